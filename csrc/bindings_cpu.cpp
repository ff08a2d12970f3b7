// The Python face of the CPU operations. It knows no torch: tensors come in as addresses and sizes (see seen_lists.h). Every
// operation is called with a table, the addresses of its lists, how many threads to use, and n, the length of the lists.
#include <algorithm>
#include <string>
#include <tuple>

#include "api.h"
#include "api_held.h"
#include "api_measures.h"
#include "api_split.h"
#include "api_steps.h"
#include "known_calls.h"
#include "state_columns.h"
#include "tensor_counters.h"

using namespace fp16opt;

namespace {

Table make_table(std::vector<int64_t> numels, std::vector<int64_t> rows, const std::vector<std::vector<int32_t>>& codes,
                 std::vector<int32_t> places) {
    std::vector<std::vector<DType>> dtypes;
    for (const auto& list : codes) {
        dtypes.emplace_back();
        for (int32_t code : list) dtypes.back().push_back(static_cast<DType>(code));
    }
    return Table(std::move(numels), std::move(rows), std::move(dtypes), std::move(places));
}

// Where a single tensor's memory begins; null for None.
template <class T>
T* memory_of(const py::object& tensor) {
    return tensor.is_none() ? nullptr : address<T>(py::read(py::As<uintptr_t>{}, tensor.attr("data_ptr")()));
}

size_t bytes_of(const py::object& tensor) { return py::read(py::As<size_t>{}, tensor.attr("nbytes")); }

void require_rows(const Table& table, int64_t n) {
    for (int32_t place : table.places) {
        if (table.rows[size_t(place)] >= n) throw std::invalid_argument("a row lies outside the lists");
    }
}

void bind_finding(py::module_& module) {
    module.def("unscale", [](const Table& table, const py::object& addresses, int threads, int64_t n, uintptr_t inv_scale,
                             uintptr_t nonfinite, uintptr_t sumsq, uintptr_t norm, uintptr_t found_inf, bool writes,
                             const py::object& accumulate) {
        const PointerLists lists(addresses);
        const std::vector<uint8_t> add = flags_of(accumulate, table.rows, n);
        const GradRows rows{address<int32_t>(nonfinite), address<double>(sumsq), n, address<double>(norm),
                            address<float>(found_inf)};
        py::gil_scoped_release release;
        unscale(table, lists.all(), *address<const float>(inv_scale), add, writes, rows, threads);
    });
    module.def("l2norm", [](const Table& table, const py::object& addresses, int threads, int64_t n, uintptr_t sumsq,
                            uintptr_t norm, uintptr_t norms) {
        const PointerLists lists(addresses);
        py::gil_scoped_release release;
        l2norm(table, lists[0], address<double>(sumsq), n, address<double>(norm), address<double>(norms), threads);
    });
    module.def("sample", [](const Table& table, const py::object& addresses, int threads, int64_t n, uintptr_t samples) {
        require_rows(table, n);
        const PointerLists lists(addresses);
        py::gil_scoped_release release;
        sample(table, lists[0], address<int64_t>(samples), threads);
    });
}

void bind_measures(py::module_& module) {
    module.def("measure", [](const Table& table, const py::object& addresses, int threads, int64_t n, uintptr_t numbers) {
        const PointerLists lists(addresses);
        py::gil_scoped_release release;
        measure(table, lists[0], address<double>(numbers), n, threads);
    });
    module.def("compare", [](const Table& table, const py::object& addresses, int threads, int64_t n, uintptr_t before,
                             uintptr_t offsets, uintptr_t numbers) {
        const PointerLists lists(addresses);
        py::gil_scoped_release release;
        compare(table, lists[0], lists[1], address<const float>(before), address<const int64_t>(offsets),
                address<double>(numbers), n, threads);
    });
}

void bind_writing(py::module_& module) {
    module.def("unscale_clipped", [](const Table& table, const py::object& addresses, int threads, int64_t,
                                     uintptr_t inv_scale, uintptr_t factor) {
        const PointerLists lists(addresses);
        py::gil_scoped_release release;
        unscale_clipped(table, lists[0], lists[1], *address<const float>(inv_scale), *address<const float>(factor), threads);
    });
    module.def("scale", [](const Table& table, const py::object& addresses, int threads, int64_t, uintptr_t factor) {
        const PointerLists lists(addresses);
        py::gil_scoped_release release;
        scale(table, lists[0], *address<const float>(factor), threads);
    });
    module.def("lerp", [](const Table& table, const py::object& addresses, int threads, int64_t, double part,
                          bool from_average) {
        const PointerLists lists(addresses);
        py::gil_scoped_release release;
        lerp(table, lists[0], lists[1], part, from_average, threads);
    });
    module.def("axpby", [](const Table& table, const py::object& addresses, int threads, int64_t, float a, float b,
                           uint32_t check, uintptr_t found_inf) {
        const PointerLists lists(addresses);
        py::gil_scoped_release release;
        const bool bad = axpby(table, a, lists[0], b, lists[1], lists[2], check, threads);
        if (bad && found_inf != 0) *address<float>(found_inf) = 1.0f;
    });
    module.def("cast", [](const Table& table, const py::object& addresses, int threads, int64_t n, uintptr_t overflow) {
        require_rows(table, n);
        const PointerLists lists(addresses);
        py::gil_scoped_release release;
        cast(table, lists[0], lists[1], address<int32_t>(overflow), threads);
    });
    module.def("split", [](const Table& table, const py::object& addresses, int threads, int64_t n, uintptr_t overflow) {
        require_rows(table, n);
        const PointerLists lists(addresses);
        py::gil_scoped_release release;
        split(table, lists[0], lists[1], lists[2], address<int32_t>(overflow), threads);
    });
    module.def("join", [](const Table& table, const py::object& addresses, int threads, int64_t) {
        const PointerLists lists(addresses);
        py::gil_scoped_release release;
        join(table, lists[0], lists[1], lists[2], threads);
    });
}

// Behind the lists of the table comes that of the scales.
void bind_held(py::module_& module) {
    module.def("encode", [](const Table& table, const py::object& addresses, int threads, int64_t) {
        const PointerLists lists(addresses);
        py::gil_scoped_release release;
        encode(table, lists[0], lists[1], lists[2], threads);
    });
    module.def("decode", [](const Table& table, const py::object& addresses, int threads, int64_t) {
        const PointerLists lists(addresses);
        py::gil_scoped_release release;
        decode(table, lists[0], lists[1], lists[2], threads);
    });
}

// The lists of a step, of which `others` follow those of the table. Groups come by row.
StepLists step_lists(const Table& table, const PointerLists& given, size_t others, bool has_models, uintptr_t overflow,
                     const py::sequence& group_of, int64_t n, uint32_t number) {
    const size_t lists = given.size() - others, state = 2 + (has_models ? 1 : 0);
    if (given.size() < state + others) throw std::invalid_argument("there are fewer lists of addresses than a step has");
    StepLists result{table, given[0], given[1], {}, has_models ? &given[lists - 1] : nullptr, {}, address<int32_t>(overflow),
                     number};
    for (size_t k = 2; k < lists - (has_models ? 1 : 0); ++k) result.state.push_back(&given[k]);
    result.group_of.reserve(table.rows.size());
    const auto groups = py::reinterpret_steal<py::object>(PySequence_Fast(group_of.ptr(), "group_of must be a sequence"));
    if (!groups) throw py::error_already_set();
    if (PySequence_Fast_GET_SIZE(groups.ptr()) != n) throw std::invalid_argument("group_of must have one entry for each row");
    for (int64_t row : table.rows) {
        const long group = PyLong_AsLong(PySequence_Fast_GET_ITEM(groups.ptr(), row));
        if (group == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
        if (group < 0 || group > INT32_MAX) throw std::invalid_argument("group_of reaches outside the groups");
        result.group_of.push_back(int32_t(group));
    }
    return result;
}

// Steps of all formulas. Behind the lists of the table come those of scales, and behind these the counters of steps, where
// the formula has them.
void bind_steps(py::module_& module) {
    module.def("step", [](const Table& table, const py::object& addresses, int threads, int64_t n, const char* name,
                          uintptr_t inv_scale, uintptr_t coefficient, uintptr_t overflow, bool has_models,
                          const py::sequence& group_of, const py::bytes& groups, uint32_t number, const py::object& first) {
        require_rows(table, n);
        const PointerLists given(addresses);
        const StepFormula& formula = formula_named(name);
        const size_t others = size_t(formula.is_coded) + size_t(formula.counts);
        const StepLists lists = step_lists(table, given, others, has_models, overflow, group_of, n, number);
        const std::vector<uint8_t> fresh = flags_of(first, table.rows, n);
        const std::string packed = groups.content();
        py::gil_scoped_release release;
        formula.step(lists, {formula.is_coded ? &given[given.size() - others] : nullptr,
                             formula.counts ? &given.all().back() : nullptr, fresh, packed, *address<const float>(inv_scale),
                             *address<const float>(coefficient), threads});
    });
}

void fill(py::module_ module) {
    py::class_<Table>(module, "Table").def(py::init(&make_table));
    bind_seen_lists(module);
    bind_known_calls(module);
    bind_tensor_counters(module);
    bind_finding(module);
    bind_measures(module);
    bind_writing(module);
    bind_held(module);
    bind_steps(module);
    module.def("state_columns", &state_columns);
    module.def("decide_clip", [](const py::object& norm, const py::object& found_inf, double max_norm, bool only_finite,
                                 const py::object& single, const py::object& factor) {
        clip_decision(memory_of<const double>(norm), memory_of<const float>(found_inf), max_norm, only_finite,
                      memory_of<float>(single), memory_of<float>(factor));
    });
    // Of a static scale there is neither a scale to change nor settings; its trackers are the skips alone.
    module.def("follow_scale", [](const py::object& count, const py::object& count_each, bool overflow, const py::object& scale,
                                  const py::object& trackers, const py::object& settings) {
        auto* first = memory_of<int32_t>(trackers);
        bool moved = false;
        if (settings.is_none()) {
            follow_scale(overflow, nullptr, nullptr, first, nullptr);
        } else {
            auto* now = memory_of<float>(scale);
            const float before = *now;
            follow_scale(overflow, now, first, first + 1, memory_of<const double>(settings));
            moved = *now != before;
        }
        py::list written(moved ? 2 : 1);
        PyList_SET_ITEM(written.ptr(), 0, trackers.inc_ref().ptr());
        if (moved) PyList_SET_ITEM(written.ptr(), 1, scale.inc_ref().ptr());
        count_writes(count, count_each, written);
        return moved;
    });
    module.def("are_equal", [](const py::object& one, const py::object& other) {
        const size_t bytes = bytes_of(one);
        return bytes == bytes_of(other) && memcmp(memory_of<const void>(one), memory_of<const void>(other), bytes) == 0;
    });
    module.def("is_zero", [](const py::object& tensor) {
        const auto* from = memory_of<const char>(tensor);
        return std::all_of(from, from + bytes_of(tensor), [](char byte) { return byte == 0; });
    });
    module.def("simd_level", [] { return current_level().name; });
    module.def("use_simd_level", &use_level);
    module.def("simd_levels", [] {
        std::vector<std::string> names;
        for (const CpuLevel* const* level = supported_levels(); *level != nullptr; ++level) names.emplace_back((*level)->name);
        return names;
    });
    current_level();  // a wrong FP16OPT_SIMD is reported at import
}

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "_cpu",
    "Multi-tensor operations on CPU memory. fp16opt.kernels.native is the guard: call nothing here directly.",
    -1,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__cpu() { return py::module_filled(definition, fill); }
