// How the module reads the state of an optimizer, which is a dictionary of each tensor's in a dictionary, as columns.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "binding.h"
#include "core/macros.h"

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

constexpr size_t kAskedFor = 256;  // dictionaries at once

// Asks the cache for what some dictionaries hold, of which everything lies elsewhere and would be waited for: first for all
// their entries, then for the values.
FP16OPT_INLINE void ask_for(const std::vector<py::object>& values, const std::optional<std::vector<size_t>>& places, size_t first,
                            size_t count) {
#if defined(__GNUC__)
    const size_t end = std::min(count, first + kAskedFor);
    const auto dictionary = [&](size_t i) {
        PyObject* of_one = values.at(places ? (*places)[i] : i).ptr();
        return PyDict_Check(of_one) ? of_one : nullptr;
    };
    for (size_t i = first; i < end; ++i) {
        PyObject* of_one = dictionary(i);
        if (of_one == nullptr) continue;
        const auto* keys = reinterpret_cast<const char*>(reinterpret_cast<PyDictObject*>(of_one)->ma_keys);
        for (int line = 0; line < 4; ++line) __builtin_prefetch(keys + 64 * line);
    }
    for (size_t i = first; i < end; ++i) {
        PyObject *of_one = dictionary(i), *key = nullptr, *value = nullptr;
        Py_ssize_t at = 0;
        while (of_one != nullptr && PyDict_Next(of_one, &at, &key, &value) != 0) __builtin_prefetch(value, 1);
    }
#else
    (void)values, (void)places, (void)first, (void)count;
#endif
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
        if (i % kAskedFor == 0) ask_for(*values, places, i, count);
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
