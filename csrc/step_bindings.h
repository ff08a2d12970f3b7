// The Python face of the one-pass steps and of split masters on CUDA; a part of bindings_cuda.cpp.
#pragma once

#include <memory>

#include "seen_lists.h"
#include "cuda_api_steps.h"

namespace fp16opt {
namespace {

using NumberTuple = std::tuple<double, uintptr_t, bool>;  // a number, or its address (else 0) and whether it is float64

Number number_from(const NumberTuple& n) {
    return {std::get<0>(n), address<const void>(std::get<1>(n)), std::get<2>(n) ? 1 : 0};
}

// Whose groups they are.
enum class StepKind : int32_t { sgd, adam, lion };

inline size_t group_size(StepKind kind) {
    return kind == StepKind::adam ? sizeof(AdamGroup) : kind == StepKind::sgd ? sizeof(SgdGroup) : sizeof(LionGroup);
}

// What a step is told beyond its tensors, with the bytes that were last written for the GPU: members, then groups.
class Numbers {
public:
    Numbers(std::vector<int32_t> places, int32_t kind, size_t groups)
        : places_(std::move(places)), kind_(StepKind(kind)), group_bytes_(groups * group_size(kind_)) {
        if (kind < 0 || kind > int32_t(StepKind::lion)) throw std::invalid_argument("there is no such step");
    }

    // `given`: the groups, each as a tuple; the group of each place; addresses of which the last list are the places' counters,
    // or None; the number of each place's step where there are no counters. How many bytes must be written anew.
    int64_t point(const py::list& given, const py::object&) {
        std::vector<char> bytes(static_cast<size_t>(all_bytes()));
        write_members(given, bytes.data());
        write_groups(given[0], bytes.data() + members_bytes());
        const bool moved = bytes != bytes_;
        bytes_ = std::move(bytes);
        return moved || !written_ ? all_bytes() : 0;
    }

    void fill(uintptr_t host) {
        std::memcpy(address<void>(host), bytes_.data(), bytes_.size());
        written_ = true;
    }
    template <class Kept>
    std::unique_ptr<Kept> keep(int device) const {
        return std::make_unique<Kept>(cuda_keep(bytes_.data(), all_bytes(), all_bytes(), device), device);
    }
    int64_t all_bytes() const { return members_bytes() + int64_t(group_bytes_); }

    const Member* members(uintptr_t memory) const { return address<const Member>(memory); }
    const void* groups(uintptr_t memory) const { return address<const void>(memory + uintptr_t(members_bytes())); }

private:
    int64_t members_bytes() const { return int64_t(places_.size() * sizeof(Member)); }

    void write_members(const py::list& given, char* to) const {
        const auto group_of = given[1].cast<std::vector<int32_t>>();
        Pointers steps;
        if (!given[2].is_none()) steps = PointerLists(py::object(given[2])).all().back();
        const auto numbers = given[3].cast<std::vector<float>>();
        for (size_t i = 0; i < places_.size(); ++i) {
            const size_t place = size_t(places_[i]);
            Member member{};
            if (!steps.empty()) member.step = static_cast<float*>(steps.at(place));
            if (!numbers.empty()) member.number = numbers.at(place);
            member.group = group_of.at(place);
            std::memcpy(to + i * sizeof(Member), &member, sizeof(Member));
        }
    }

    void write_groups(const py::object& given, char* to) const {
        if (kind_ == StepKind::adam) {
            write_all<AdamGroup, NumberTuple, double, double, double, double, bool, bool>(given, to);
        } else if (kind_ == StepKind::lion) {
            write_all<LionGroup, NumberTuple, double, double, double, bool>(given, to);
        } else {
            write_all<SgdGroup, NumberTuple, double, double, double, bool, bool>(given, to);
        }
    }

    template <class Group, class... Values>
    void write_all(const py::object& given, char* to) const {
        const auto groups = given.cast<std::vector<std::tuple<Values...>>>();
        if (groups.size() * sizeof(Group) != group_bytes_) throw std::invalid_argument("there are more or fewer groups");
        for (const auto& values : groups) {
            const Group group = std::apply(
                [](const NumberTuple& lr, auto... rest) { return Group{number_from(lr), rest...}; }, values);
            std::memcpy(to, &group, sizeof(Group));
            to += sizeof(Group);
        }
    }

    std::vector<int32_t> places_;
    StepKind kind_;
    size_t group_bytes_;
    bool written_ = false;
    std::vector<char> bytes_;
};

inline void cuda_lion_alone(const Launch& launch, const CudaStep& step, bool) { cuda_lion(launch, step); }

// `Table`, `Where` and `Kept` are those of bindings_cuda.cpp.
template <class Table, class Where, void (*operation)(const Launch&, const CudaStep&, bool)>
void bind_step(py::module_& module, const char* name) {
    module.def(name, [](const Table& table, const Where& where, int64_t n, const Numbers& numbers,
                        const Where& numbers_where, uintptr_t inv_scale, uintptr_t coefficient, uintptr_t found_inf,
                        bool has_models, uintptr_t overflow, bool more_state) {
        const CudaStep step{address<const float>(inv_scale),
                            address<const float>(coefficient),
                            address<const float>(found_inf),
                            numbers.members(numbers_where.memory),
                            numbers.groups(numbers_where.memory),
                            has_models,
                            address<int32_t>(overflow),
                            n};
        operation(table.at(where.memory, where.device, where.stream), step, more_state);
    });
}

template <class Table, class Where, class Kept>
void bind_stepping(py::module_& module) {
    py::class_<Numbers>(module, "Numbers", py::module_local())
        .def(py::init<std::vector<int32_t>, int32_t, size_t>())
        .def("point", &Numbers::point)
        .def("fill", &Numbers::fill)
        .def("keep", &Numbers::keep<Kept>)
        .def("all_bytes", &Numbers::all_bytes);
    bind_step<Table, Where, cuda_adam>(module, "adam");
    bind_step<Table, Where, cuda_sgd>(module, "sgd");
    bind_step<Table, Where, cuda_lion_alone>(module, "lion");
    module.def("split", [](const Table& table, const Where& where, int64_t n, uintptr_t overflow) {
        cuda_split(table.at(where.memory, where.device, where.stream), address<int32_t>(overflow), n);
    });
    module.def("renew", [](const Table& table, const Where& where, int64_t n, uintptr_t now, uintptr_t then,
                           uintptr_t taken) {
        cuda_renew(table.at(where.memory, where.device, where.stream), address<const int64_t>(now),
                   address<const int64_t>(then), address<int32_t>(taken), n);
    });
    module.def("join", [](const Table& table, const Where& where, int64_t) {
        cuda_join(table.at(where.memory, where.device, where.stream));
    });
}

}  // namespace
}  // namespace fp16opt
