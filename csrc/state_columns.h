// How the module reads the state of an optimizer, which is a dictionary of each tensor's in a dictionary, as columns.
#pragma once

#include <optional>
#include <vector>

#include "binding.h"

namespace fp16opt {
namespace {

// The values of `state`, where its keys are `keys`, in their order; else nothing.
std::optional<std::vector<py::object>> values_of(const py::dict& state, const py::list& keys) {
    if (PyDict_GET_SIZE(state.ptr()) != Py_ssize_t(keys.size())) return std::nullopt;
    std::vector<py::object> values;
    values.reserve(keys.size());
    Py_ssize_t at = 0;
    PyObject *key = nullptr, *value = nullptr;
    while (PyDict_Next(state.ptr(), &at, &key, &value) != 0) {
        if (key != PyList_GET_ITEM(keys.ptr(), Py_ssize_t(values.size()))) return std::nullopt;
        values.push_back(py::reinterpret_borrow<py::object>(value));
    }
    return values;
}

// For each of `names` what the dictionaries in `state` have there: those at `places`, or all. None where the keys of `state`
// are other than `keys`, or in another order, or where something is missing or None.
py::object state_columns(const py::dict& state, const py::list& keys, const std::optional<std::vector<size_t>>& places,
                         const std::vector<py::object>& names) {
    const auto values = values_of(state, keys);
    if (!values) return py::none();
    const size_t count = places ? places->size() : values->size();
    std::vector<py::list> columns;
    for (size_t k = 0; k < names.size(); ++k) columns.emplace_back(count);
    for (size_t i = 0; i < count; ++i) {
        PyObject* of_one = values->at(places ? (*places)[i] : i).ptr();
        if (!PyDict_Check(of_one)) return py::none();
        for (size_t k = 0; k < names.size(); ++k) {
            auto value = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(of_one, names[k].ptr()));
            if (!value && PyErr_Occurred() != nullptr) throw py::error_already_set();
            if (!value || value.is_none()) return py::none();
            PyList_SET_ITEM(columns[k].ptr(), Py_ssize_t(i), value.release().ptr());
        }
    }
    return py::written(columns);
}

}  // namespace
}  // namespace fp16opt
