// The Python face of the CPU operations, and the only file that knows Python. It knows no torch either: tensors come in
// as addresses and sizes, read through DLPack's C exchange table where the tensor type offers one.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>

#include "api.h"
#include "api_steps.h"
#include "dlpack_exchange.h"

namespace py = pybind11;
using namespace fp16opt;

namespace {

// The addresses of a list of tensors, at one moment.
struct Addresses {
    Pointers pointers;
};

// What was seen of a list of tensors. Between calls it proves that dtype, device, shape and strides are still the same,
// which from Python takes longer than the arithmetic on small tensors.
class Column {
public:
    // Throws TypeError where `tensors` holds something else than `tensor_type`, and whatever the exchange raises.
    Column(const py::capsule& exchange, const py::type& tensor_type, const py::list& tensors)
        : api_(exchange_from(exchange)) {
        for (py::handle tensor : tensors) {
            if (!PyObject_TypeCheck(tensor.ptr(), reinterpret_cast<PyTypeObject*>(tensor_type.ptr()))) {
                throw py::type_error("a list holds something that is not a tensor");
            }
            DLTensor seen;
            if (api_->dltensor_from_py_object_no_sync(tensor.ptr(), &seen) != 0) throw py::error_already_set();
            if (seen.strides == nullptr && seen.ndim != 0) throw py::value_error("the exchange reports no strides");
            types_.push_back(py::type::of(tensor));
            kinds_.push_back({seen.dtype, seen.device, seen.ndim});
            extents_.insert(extents_.end(), seen.shape, seen.shape + seen.ndim);
            extents_.insert(extents_.end(), seen.strides, seen.strides + seen.ndim);
        }
    }

    // Reads the tensors again: their addresses, or None where something is not as it was.
    py::object match(const py::list& tensors) const {
        if (tensors.size() != types_.size()) return py::none();
        Addresses found;
        found.pointers.reserve(types_.size());
        const int64_t* extent = extents_.data();
        for (size_t i = 0; i < types_.size(); ++i) {
            PyObject* tensor = PyList_GET_ITEM(tensors.ptr(), Py_ssize_t(i));
            if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != types_[i].ptr()) return py::none();
            DLTensor seen;
            if (api_->dltensor_from_py_object_no_sync(tensor, &seen) != 0) {
                PyErr_Clear();  // not a dense tensor any more: the full check will say what it is
                return py::none();
            }
            if (!(kinds_[i] == Kind{seen.dtype, seen.device, seen.ndim})) return py::none();
            const size_t bytes = size_t(seen.ndim) * sizeof(int64_t);
            if (bytes != 0 && (seen.strides == nullptr || std::memcmp(extent, seen.shape, bytes) != 0 ||
                               std::memcmp(extent + seen.ndim, seen.strides, bytes) != 0)) {
                return py::none();
            }
            extent += 2 * seen.ndim;
            found.pointers.push_back(static_cast<char*>(seen.data) + seen.byte_offset);
        }
        return py::cast(std::move(found));
    }

private:
    struct Kind {
        DLDataType dtype;
        DLDevice device;
        int32_t ndim;
        bool operator==(const Kind& o) const {
            return dtype.code == o.dtype.code && dtype.bits == o.dtype.bits && dtype.lanes == o.dtype.lanes &&
                   device.device_type == o.device.device_type && device.device_id == o.device.device_id &&
                   ndim == o.ndim;
        }
    };

    const DLPackExchangeAPI* api_;
    std::vector<py::type> types_;
    std::vector<Kind> kinds_;
    std::vector<int64_t> extents_;  // shape and strides of each tensor, one after the other
};

// Addresses as a Column found them, or as a list of integers.
Pointers pointers_of(const py::object& source) {
    if (py::isinstance<Addresses>(source)) return source.cast<const Addresses&>().pointers;
    Pointers result;
    for (py::handle address : source.cast<py::list>()) {
        result.push_back(reinterpret_cast<void*>(address.cast<uintptr_t>()));
    }
    return result;
}

// One flag for each tensor, from one bool or a list of them.
std::vector<uint8_t> flags_of(const py::object& source, size_t count) {
    if (py::isinstance<py::bool_>(source)) return std::vector<uint8_t>(count, source.cast<bool>());
    const auto flags = source.cast<std::vector<bool>>();
    return {flags.begin(), flags.end()};
}

template <class T>
T* address(uintptr_t at) {
    return reinterpret_cast<T*>(at);
}

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

}  // namespace

PYBIND11_MODULE(_cpu, module) {
    module.doc() = "Multi-tensor operations on CPU memory. fp16opt.kernels.native is the guard: call nothing here directly.";
    py::class_<Table>(module, "Table").def(py::init(&make_table));
    py::class_<Addresses>(module, "Addresses");
    py::class_<Column>(module, "Column")
        .def(py::init<const py::capsule&, const py::type&, const py::list&>())
        .def("match", &Column::match);
    bind_operations(module);
    bind_steps(module);
    module.def("simd_level", [] { return current_level().name; });
    module.def("use_simd_level", &use_level);
    module.def("simd_levels", [] {
        std::vector<std::string> names;
        for (const CpuLevel* const* level = supported_levels(); *level != nullptr; ++level) names.emplace_back((*level)->name);
        return names;
    });
    current_level();  // a wrong FP16OPT_SIMD is reported at import
}
