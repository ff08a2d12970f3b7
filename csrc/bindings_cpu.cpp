// The Python face of the CPU operations. It knows no torch: tensors come in as addresses and sizes. Every operation is called
// with a table, the addresses of its lists, how many threads to use, and n, the length of the lists.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "api.h"
#include "api_changes.h"
#include "api_measures.h"
#include "api_split.h"
#include "api_steps.h"
#include "bindings_tensors.h"

namespace py = pybind11;
using namespace fp16opt;

namespace {

// -- what Python gives -------------------------------------------------------------------------------------------------

// Lets other threads of Python run. Where Python has ended meanwhile, it unwinds the thread that asks for its lock. The destructor
// of py::gil_scoped_release lets nothing through, so that the process would abort.
class ReleasedGil {
public:
    ReleasedGil() : state_(PyEval_SaveThread()) {}
    ReleasedGil(const ReleasedGil&) = delete;
    ~ReleasedGil() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            for (;;) pause();
        }
    }

private:
    PyThreadState* state_;
};

template <class T>
T* address(uintptr_t at) {
    return reinterpret_cast<T*>(at);
}

// One list of addresses, from what was read of a list of tensors, from a buffer of unsigned 64-bit integers, as
// array.array("Q"), or from a sequence of ints. They are copied: another thread may write to the source while the lock is
// released.
Pointers pointers_of(py::handle source) {
    if (py::isinstance<Reading>(source)) return source.cast<const Reading&>().addresses;
    static_assert(sizeof(void*) == sizeof(unsigned long long) && sizeof(size_t) == sizeof(void*), "addresses have 64 bits");
    if (PyObject_CheckBuffer(source.ptr())) {
        const py::buffer_info buffer = py::reinterpret_borrow<py::buffer>(source).request();
        if (buffer.ndim != 1 || buffer.strides[0] != buffer.itemsize || !buffer.item_type_is_equivalent_to<unsigned long long>()) {
            throw py::type_error("a buffer of addresses must be contiguous and hold unsigned 64-bit integers");
        }
        const auto* from = static_cast<void* const*>(buffer.ptr);
        return Pointers(from, from + buffer.size);
    }
    PyObject* const fast = PySequence_Fast(source.ptr(), "addresses must be a buffer or a sequence of ints");
    const auto items = py::reinterpret_steal<py::object>(fast);
    if (!items) throw py::error_already_set();
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(items.ptr());
    Pointers pointers;
    pointers.reserve(size_t(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
        const size_t at = PyLong_AsSize_t(PySequence_Fast_GET_ITEM(items.ptr(), i));  // runs no code of Python's
        if (at == size_t(-1) && PyErr_Occurred() != nullptr) throw py::error_already_set();
        pointers.push_back(reinterpret_cast<void*>(at));
    }
    return pointers;
}

// The addresses of a call's lists, each by place.
class PointerLists {
public:
    explicit PointerLists(const py::object& source) {
        for (py::handle list : py::tuple(source)) lists_.push_back(pointers_of(list));
    }
    size_t size() const { return lists_.size(); }
    const Pointers& operator[](size_t list) const {
        if (list >= lists_.size()) throw std::invalid_argument("there are fewer lists of addresses than the operation has");
        return lists_[list];
    }
    const std::vector<Pointers>& all() const { return lists_; }

private:
    std::vector<Pointers> lists_;
};

// One flag for each entry: from one bool, or from a sequence of n of them.
std::vector<uint8_t> flags_of(const py::object& source, int64_t n) {
    if (py::isinstance<py::bool_>(source)) return std::vector<uint8_t>(size_t(n), source.cast<bool>());
    const py::tuple all(source);
    if (int64_t(all.size()) != n) throw std::invalid_argument("there must be one flag for each entry");
    std::vector<uint8_t> flags;
    flags.reserve(size_t(n));
    for (py::handle flag : all) {
        const int truth = PyObject_IsTrue(flag.ptr());
        if (truth < 0) throw py::error_already_set();
        flags.push_back(uint8_t(truth));
    }
    return flags;
}

// The group of each entry, from a sequence of n ints.
std::vector<int32_t> groups_of(const py::object& source, int64_t n) {
    const py::tuple all(source);
    if (int64_t(all.size()) != n) throw std::invalid_argument("group_of must have one entry for each row");
    std::vector<int32_t> groups;
    groups.reserve(size_t(n));
    for (py::handle each : all) {
        const long group = PyLong_AsLong(each.ptr());
        if (group == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
        if (group < 0 || group > INT32_MAX) throw std::invalid_argument("group_of reaches outside the groups");
        groups.push_back(int32_t(group));
    }
    return groups;
}

Table make_table(std::vector<int64_t> numels, const std::vector<std::vector<int32_t>>& codes, std::vector<int32_t> places,
                 const std::vector<std::array<int64_t, 3>>& pieces) {
    std::vector<std::vector<DType>> dtypes;
    for (const auto& list : codes) {
        dtypes.emplace_back();
        for (int32_t code : list) dtypes.back().push_back(static_cast<DType>(code));
    }
    std::vector<Piece> of_each;
    for (const auto& piece : pieces) of_each.push_back({piece[0], piece[1], piece[2]});
    return Table(std::move(numels), std::move(dtypes), std::move(places), of_each);
}

Marks marks_at(uintptr_t memory, uintptr_t offsets) { return {address<uint64_t>(memory), address<const int64_t>(offsets)}; }

void require_rows(const Table& table, int64_t n) {
    for (int32_t place : table.places) {
        if (place >= n) throw std::invalid_argument("a row lies outside the lists");
    }
}

// Writes the addresses of `count` lists from the `first` on, of the tensors at `places` or of all, to memory, `stride` bytes
// apart. Whether one of them is not what was there.
bool put_addresses(const py::object& source, size_t first, size_t count, const std::optional<std::vector<size_t>>& places,
                   uintptr_t to, size_t stride) {
    const py::tuple lists(source);
    if (first + count > lists.size()) throw std::invalid_argument("there are fewer lists of addresses than were asked for");
    char* at = address<char>(to);
    bool moved = false;
    const auto put = [&](void* pointer) {
        void* before;
        std::memcpy(&before, at, sizeof(before));
        moved |= before != pointer;
        std::memcpy(at, &pointer, sizeof(pointer));
        at += stride;
    };
    for (size_t k = first; k < first + count; ++k) {
        const Pointers list = pointers_of(lists[k]);
        if (!places) {
            for (void* pointer : list) put(pointer);
            continue;
        }
        for (size_t place : *places) put(list.at(place));
    }
    return moved;
}

// -- what Python calls -------------------------------------------------------------------------------------------------

void bind_finding(py::module_& module) {
    module.def("unscale", [](const Table& table, const py::object& addresses, int threads, int64_t n, uintptr_t inv_scale,
                             uintptr_t nonfinite, uintptr_t sumsq, uintptr_t norm, uintptr_t found_inf, bool writes,
                             const py::object& accumulate) {
        const PointerLists lists(addresses);
        const std::vector<uint8_t> add = flags_of(accumulate, n);
        const GradRows rows{address<int32_t>(nonfinite), address<double>(sumsq), n, address<double>(norm),
                            address<float>(found_inf)};
        const ReleasedGil released;
        unscale(table, lists.all(), *address<const float>(inv_scale), add, writes, rows, threads);
    });
    module.def("l2norm", [](const Table& table, const py::object& addresses, int threads, int64_t n, uintptr_t sumsq,
                            uintptr_t norm, uintptr_t norms) {
        const PointerLists lists(addresses);
        const ReleasedGil released;
        l2norm(table, lists[0], address<double>(sumsq), n, address<double>(norm), address<double>(norms), threads);
    });
    module.def("sample", [](const Table& table, const py::object& addresses, int threads, int64_t n, uintptr_t samples) {
        require_rows(table, n);
        const PointerLists lists(addresses);
        const ReleasedGil released;
        sample(table, lists[0], address<int64_t>(samples), threads);
    });
}

void bind_measures(py::module_& module) {
    module.def("measure", [](const Table& table, const py::object& addresses, int threads, int64_t n, uintptr_t numbers) {
        const PointerLists lists(addresses);
        const ReleasedGil released;
        measure(table, lists[0], address<double>(numbers), n, threads);
    });
    module.def("compare", [](const Table& table, const py::object& addresses, int threads, int64_t n, uintptr_t before,
                             uintptr_t offsets, uintptr_t numbers) {
        const PointerLists lists(addresses);
        const ReleasedGil released;
        compare(table, lists[0], lists[1], address<const float>(before), address<const int64_t>(offsets),
                address<double>(numbers), n, threads);
    });
}

void bind_writing(py::module_& module) {
    module.def("unscale_clipped", [](const Table& table, const py::object& addresses, int threads, int64_t,
                                     uintptr_t inv_scale, uintptr_t factor) {
        const PointerLists lists(addresses);
        const ReleasedGil released;
        unscale_clipped(table, lists[0], lists[1], *address<const float>(inv_scale), *address<const float>(factor), threads);
    });
    module.def("scale", [](const Table& table, const py::object& addresses, int threads, int64_t, uintptr_t factor) {
        const PointerLists lists(addresses);
        const ReleasedGil released;
        scale(table, lists[0], *address<const float>(factor), threads);
    });
    module.def("lerp", [](const Table& table, const py::object& addresses, int threads, int64_t, double part,
                          bool from_average) {
        const PointerLists lists(addresses);
        const ReleasedGil released;
        lerp(table, lists[0], lists[1], part, from_average, threads);
    });
    module.def("axpby", [](const Table& table, const py::object& addresses, int threads, int64_t, float a, float b,
                           uint32_t check, uintptr_t found_inf) {
        const PointerLists lists(addresses);
        const ReleasedGil released;
        const bool bad = axpby(table, a, lists[0], b, lists[1], lists[2], check, threads);
        if (bad && found_inf != 0) *address<float>(found_inf) = 1.0f;
    });
    module.def("cast", [](const Table& table, const py::object& addresses, int threads, int64_t n, uintptr_t overflow,
                          uintptr_t memory, uintptr_t offsets) {
        require_rows(table, n);
        const PointerLists lists(addresses);
        const ReleasedGil released;
        cast(table, lists[0], lists[1], address<int32_t>(overflow), marks_at(memory, offsets), threads);
    });
    module.def("split", [](const Table& table, const py::object& addresses, int threads, int64_t n, uintptr_t overflow,
                           uintptr_t memory, uintptr_t offsets) {
        require_rows(table, n);
        const PointerLists lists(addresses);
        const ReleasedGil released;
        split(table, lists[0], lists[1], lists[2], address<int32_t>(overflow), marks_at(memory, offsets), threads);
    });
    module.def("join", [](const Table& table, const py::object& addresses, int threads, int64_t) {
        const PointerLists lists(addresses);
        const ReleasedGil released;
        join(table, lists[0], lists[1], lists[2], threads);
    });
}

// The lists of a step, of which `others` follow those of the table. Groups come by row.
StepLists step_lists(const Table& table, const PointerLists& given, size_t others, bool has_models, uintptr_t overflow,
                     const Marks& marks, const py::object& group_of, int64_t n, uint32_t number) {
    const size_t lists = given.size() - others, state = 2 + (has_models ? 1 : 0);
    if (given.size() < state + others) throw std::invalid_argument("there are fewer lists of addresses than a step has");
    StepLists result{table, given[0], given[1], {}, has_models ? &given[lists - 1] : nullptr,
                     groups_of(group_of, n), address<int32_t>(overflow), marks, number};
    for (size_t k = 2; k < lists - (has_models ? 1 : 0); ++k) result.state.push_back(&given[k]);
    return result;
}

// Steps of all formulas. Behind the lists of the table come those of scales, and behind these the counters of steps, where
// the formula has them.
void bind_steps(py::module_& module) {
    module.def("step", [](const Table& table, const py::object& addresses, int threads, int64_t n, const std::string& name,
                          uintptr_t inv_scale, uintptr_t coefficient, uintptr_t overflow, uintptr_t memory,
                          uintptr_t offsets, bool has_models, const py::object& group_of, const py::bytes& groups, uint32_t number, const py::object& first) {
        require_rows(table, n);
        const PointerLists given(addresses);
        const StepFormula& formula = formula_named(name);
        const size_t others = size_t(formula.is_coded) + size_t(formula.counts);
        const StepLists lists = step_lists(table, given, others, has_models, overflow, marks_at(memory, offsets), group_of, n, number);
        const std::vector<uint8_t> fresh = flags_of(first, n);
        const std::string packed = groups;
        const ReleasedGil released;
        formula.step(lists, {formula.is_coded ? &given[given.size() - others] : nullptr,
                             formula.counts ? &given.all().back() : nullptr, fresh, packed, *address<const float>(inv_scale),
                             *address<const float>(coefficient), threads});
    });
}

void bind_changes(py::module_& module) {
    module.def("digest", [](uintptr_t words, int64_t n, uint32_t first, int threads) {
        const ReleasedGil released;
        return int64_t(digest(address<const uint16_t>(words), n, first, threads));
    });
    module.def("guard", [](uintptr_t words, int64_t n, int threads) {
        const ReleasedGil released;
        return guard(address<const uint16_t>(words), n, threads);
    });
    module.def("guard_and_digest", [](uintptr_t words, int64_t n, uint32_t first, int threads) {
        const ReleasedGil released;
        const GuardAndDigest found = guard_and_digest(address<const uint16_t>(words), n, first, threads);
        return std::pair<uint32_t, int64_t>(found.guard, int64_t(found.digest));
    });
    module.def("count_marked", [](uintptr_t bits, int64_t n, int threads) {
        const ReleasedGil released;
        return count_marked(address<const uint64_t>(bits), n, threads);
    });
    module.def("take_marked", [](uintptr_t bits, uintptr_t words, int64_t n, uintptr_t places, bool wide, uintptr_t taken,
                                 int threads) {
        const ReleasedGil released;
        return take_marked(address<const uint64_t>(bits), address<const uint16_t>(words), n, address<void>(places),
                                   wide, address<uint16_t>(taken), threads);
    });
}

void bind_decisions(py::module_& module) {
    module.def("decide_clip", [](uintptr_t norm, uintptr_t found_inf, double max_norm, bool only_finite, uintptr_t single,
                                 uintptr_t factor) {
        clip_decision(address<const double>(norm), address<const float>(found_inf), max_norm, only_finite, address<float>(single),
                      address<float>(factor));
    });
    // A static scale neither moves nor has settings: its only tracker counts skips.
    module.def("follow_scale", [](bool overflow, uintptr_t scale, uintptr_t trackers, uintptr_t settings) {
        auto* first = address<int32_t>(trackers);
        if (settings == 0) {
            follow_scale(overflow, nullptr, nullptr, first, nullptr);
            return false;
        }
        auto* now = address<float>(scale);
        const float before = *now;
        follow_scale(overflow, now, first, first + 1, address<const double>(settings));
        return *now != before;
    });
    module.def("are_equal", [](uintptr_t one, uintptr_t other, size_t bytes) {
        const ReleasedGil released;
        return bytes == 0 || std::memcmp(address<const void>(one), address<const void>(other), bytes) == 0;
    });
    module.def("is_zero", [](uintptr_t at, size_t bytes) {
        const ReleasedGil released;
        const char* from = address<const char>(at);
        return std::all_of(from, from + bytes, [](char byte) { return byte == 0; });
    });
}

void bind_levels(py::module_& module) {
    module.def("simd_level", [] { return current_level().name; });
    module.def("use_simd_level", [](const std::string& name) { use_level(name.c_str()); });
    module.def("simd_levels", [] {
        std::vector<std::string> names;
        for (const CpuLevel* const* level = supported_levels(); *level != nullptr; ++level) names.emplace_back((*level)->name);
        return names;
    });
}

}  // namespace

PYBIND11_MODULE(_cpu, module) {
    module.doc() = "Multi-tensor operations on CPU memory. fp16opt.kernels.native is the guard: call nothing here directly.";
    py::class_<Table>(module, "Table").def(
        py::init(&make_table), py::arg("numels"), py::arg("codes"), py::arg("places"),
        py::arg("pieces") = std::vector<std::array<int64_t, 3>>());
    module.def("put_addresses", &put_addresses);
    bind_tensors(module);
    bind_finding(module);
    bind_measures(module);
    bind_writing(module);
    bind_steps(module);
    bind_changes(module);
    bind_decisions(module);
    bind_levels(module);
    current_level();  // a wrong FP16OPT_SIMD is reported at import
}
