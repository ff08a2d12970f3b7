// How both modules get the addresses of tensors: as a list of integers, or read through DLPack's C exchange table where
// the tensor type offers one.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <utility>
#include <vector>

#include "dlpack_exchange.h"

namespace py = pybind11;

namespace fp16opt {

using Pointers = std::vector<void*>;

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

// Each module has types of its own: addresses that one of them read are not given to the other.
void bind_columns(py::module_& module) {
    py::class_<Addresses>(module, "Addresses", py::module_local());
    py::class_<Column>(module, "Column", py::module_local())
        .def(py::init<const py::capsule&, const py::type&, const py::list&>())
        .def("match", &Column::match);
}

}  // namespace
}  // namespace fp16opt
