// The Python face of the CPU operations. It knows no torch: tensors come in as addresses and sizes (see columns.h).
#include <optional>
#include <string>
#include <tuple>

#include "api.h"
#include "api_split.h"
#include "api_steps.h"
#include "columns.h"

namespace py = pybind11;
using namespace fp16opt;

namespace {

// (table, addresses, where hashes are written, where samples are written), or None.
class WatchedLists {
public:
    explicit WatchedLists(const py::object& source) {
        if (source.is_none()) return;
        const auto parts = source.cast<py::tuple>();
        params_ = pointers_of(parts[1]);
        watched_.emplace(Watched{parts[0].cast<const Table&>(), params_, address<int64_t>(parts[2].cast<uintptr_t>()),
                                 address<int64_t>(parts[3].cast<uintptr_t>())});
    }
    WatchedLists(const WatchedLists&) = delete;
    const Watched* get() const { return watched_ ? &*watched_ : nullptr; }

private:
    Pointers params_;
    std::optional<Watched> watched_;
};

Table make_table(std::vector<int64_t> numels, std::vector<int64_t> rows, const std::vector<std::vector<int32_t>>& codes,
                 std::vector<int32_t> places) {
    std::vector<std::vector<DType>> dtypes;
    for (const auto& list : codes) {
        dtypes.emplace_back();
        for (int32_t code : list) dtypes.back().push_back(static_cast<DType>(code));
    }
    return Table(std::move(numels), std::move(rows), std::move(dtypes), std::move(places));
}

void bind_operations(py::module_& module) {
    module.def("unscale", [](const Table& table, const py::object& grads, const py::object& outs, float inv_scale,
                             const py::object& accumulate, bool writes, uintptr_t nonfinite, uintptr_t sumsq,
                             int64_t n, uintptr_t norm, uintptr_t found_inf, const py::object& watched, int threads) {
        const Pointers from = pointers_of(grads), to = pointers_of(outs);
        const std::vector<uint8_t> add = flags_of(accumulate, from.size());
        const GradRows rows{address<int32_t>(nonfinite), address<double>(sumsq), n, address<double>(norm),
                            address<float>(found_inf)};
        const WatchedLists lists(watched);
        py::gil_scoped_release release;
        unscale(table, from, to, inv_scale, add, writes, rows, lists.get(), threads);
    });
    module.def("unscale_clipped", [](const Table& table, const py::object& grads, const py::object& outs, float inv_scale,
                                     float factor, const py::object& watched, int threads) {
        const Pointers from = pointers_of(grads), to = pointers_of(outs);
        const WatchedLists lists(watched);
        py::gil_scoped_release release;
        unscale_clipped(table, from, to, inv_scale, factor, lists.get(), threads);
    });
    module.def("l2norm", [](const Table& table, const py::object& tensors, uintptr_t sumsq, int64_t n, uintptr_t norm,
                            uintptr_t norms, int threads) {
        const Pointers of = pointers_of(tensors);
        py::gil_scoped_release release;
        l2norm(table, of, address<double>(sumsq), n, address<double>(norm), address<double>(norms), threads);
    });
    module.def("scale", [](const Table& table, const py::object& tensors, float factor, int threads) {
        const Pointers of = pointers_of(tensors);
        py::gil_scoped_release release;
        scale(table, of, factor, threads);
    });
    module.def("axpby", [](const Table& table, float a, const py::object& xs, float b, const py::object& ys,
                           const py::object& outs, uint32_t check, int threads) {
        const Pointers x = pointers_of(xs), y = pointers_of(ys), to = pointers_of(outs);
        py::gil_scoped_release release;
        return axpby(table, a, x, b, y, to, check, threads);
    });
    module.def("cast", [](const Table& table, const py::object& masters, const py::object& params, uintptr_t overflow,
                          uintptr_t hashes, int threads) {
        const Pointers from = pointers_of(masters), to = pointers_of(params);
        py::gil_scoped_release release;
        cast(table, from, to, address<int32_t>(overflow), address<int64_t>(hashes), threads);
    });
    module.def("clip_decision", &clip_decision);
    module.def("follow_scale", [](bool overflow, uintptr_t scale, uintptr_t clean, uintptr_t skips, uintptr_t settings) {
        follow_scale(overflow, address<float>(scale), address<int32_t>(clean), address<int32_t>(skips),
                     address<const double>(settings));
    });
    module.def("content_hash", [](const Table& table, const py::object& tensors, uintptr_t hashes, int threads) {
        const Pointers of = pointers_of(tensors);
        py::gil_scoped_release release;
        content_hash(table, of, address<int64_t>(hashes), threads);
    });
    module.def("content_sample", [](const Table& table, const py::object& tensors, uintptr_t samples, int threads) {
        const Pointers of = pointers_of(tensors);
        py::gil_scoped_release release;
        content_sample(table, of, address<int64_t>(samples), threads);
    });
}

// What `cast` writes, and the lists of a step by place, kept alive for the call.
struct StepArguments {
    Pointers grads, masters, models;
    std::vector<Pointers> state;
    std::vector<int32_t> group_of;

    StepArguments(const py::object& from, const py::object& to, const py::list& kept, const py::object& narrow,
                  std::vector<int32_t> groups)
        : grads(pointers_of(from)), masters(pointers_of(to)), group_of(std::move(groups)) {
        for (py::handle list : kept) state.push_back(pointers_of(py::reinterpret_borrow<py::object>(list)));
        if (!narrow.is_none()) models = pointers_of(narrow);
    }

    StepLists lists(const Table& table, bool has_models, uintptr_t overflow, uintptr_t hashes) const {
        StepLists result{table, grads, masters, {}, has_models ? &models : nullptr, group_of, address<int32_t>(overflow),
                         address<int64_t>(hashes)};
        for (const Pointers& list : state) result.state.push_back(&list);
        return result;
    }
};

void bind_steps(py::module_& module) {
    module.def("adam", [](const Table& table, const py::object& grads, const py::object& masters, const py::list& state,
                          const py::object& models, const py::object& steps, std::vector<int32_t> group_of,
                          const std::vector<std::tuple<double, double, double, double, double, bool, bool>>& options,
                          float inv_scale, float coefficient, uintptr_t overflow, uintptr_t hashes, int threads) {
        const StepArguments given(grads, masters, state, models, std::move(group_of));
        const Pointers counts = pointers_of(steps);
        std::vector<AdamOptions> groups;
        for (const auto& o : options) {
            groups.push_back(std::apply([](auto... values) { return AdamOptions{values...}; }, o));
        }
        const StepLists lists = given.lists(table, !models.is_none(), overflow, hashes);
        py::gil_scoped_release release;
        adam(lists, counts, groups, inv_scale, coefficient, threads);
    });
    module.def("sgd", [](const Table& table, const py::object& grads, const py::object& masters, const py::list& state,
                         const py::object& models, const std::vector<bool>& first, std::vector<int32_t> group_of,
                         const std::vector<std::tuple<double, double, double, double, bool, bool>>& options,
                         float inv_scale, float coefficient, uintptr_t overflow, uintptr_t hashes, int threads) {
        const StepArguments given(grads, masters, state, models, std::move(group_of));
        std::vector<SgdOptions> groups;
        for (const auto& o : options) {
            groups.push_back(std::apply([](auto... values) { return SgdOptions{values...}; }, o));
        }
        const std::vector<uint8_t> fresh(first.begin(), first.end());
        const StepLists lists = given.lists(table, !models.is_none(), overflow, hashes);
        py::gil_scoped_release release;
        sgd(lists, fresh, groups, inv_scale, coefficient, threads);
    });
}

void bind_split(py::module_& module) {
    module.def("split", [](const Table& table, const py::object& masters, const py::object& models,
                           const py::object& remainders, uintptr_t overflow, uintptr_t hashes, int threads) {
        const Pointers from = pointers_of(masters), to = pointers_of(models), rest = pointers_of(remainders);
        py::gil_scoped_release release;
        split(table, from, to, rest, address<int32_t>(overflow), address<int64_t>(hashes), threads);
    });
    module.def("join", [](const Table& table, const py::object& models, const py::object& remainders,
                          const py::object& outs, int threads) {
        const Pointers from = pointers_of(models), rest = pointers_of(remainders), to = pointers_of(outs);
        py::gil_scoped_release release;
        join(table, from, rest, to, threads);
    });
}

}  // namespace

PYBIND11_MODULE(_cpu, module) {
    module.doc() = "Multi-tensor operations on CPU memory. fp16opt.kernels.native is the guard: call nothing here directly.";
    py::class_<Table>(module, "Table").def(py::init(&make_table));
    bind_columns(module);
    bind_operations(module);
    bind_steps(module);
    bind_split(module);
    module.def("simd_level", [] { return current_level().name; });
    module.def("use_simd_level", &use_level);
    module.def("simd_levels", [] {
        std::vector<std::string> names;
        for (const CpuLevel* const* level = supported_levels(); *level != nullptr; ++level) names.emplace_back((*level)->name);
        return names;
    });
    current_level();  // a wrong FP16OPT_SIMD is reported at import
}
