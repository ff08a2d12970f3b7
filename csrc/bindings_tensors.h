// What was read of a list of torch's tensors: see bindings_tensors.cpp.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

namespace fp16opt {

// The classes, dtypes, devices, shapes and strides of the tensors of one list.
struct Forms {
    // Of one tensor: its class, dtype, device, dimensions.
    using Form = std::tuple<PyObject*, uint64_t, int32_t, int32_t, int32_t>;

    std::vector<Form> each;
    std::vector<int64_t> sizes;           // of one tensor after the other, its shape and its strides
    std::vector<pybind11::object> types;  // which keeps the classes alive

    bool operator==(const Forms& other) const { return each == other.each && sizes == other.sizes; }
    void note_type(pybind11::handle type) {
        const auto is_type = [type](const pybind11::object& one) { return one.is(type); };
        if (std::none_of(types.begin(), types.end(), is_type)) types.push_back(pybind11::reinterpret_borrow<pybind11::object>(type));
    }
};

// How often each tensor of a list was written.
using Counts = std::vector<int64_t>;

// How the tensors of one list lay in memory when they were read. It keeps none of them alive.
struct Reading {
    std::vector<void*> addresses;
    std::shared_ptr<const Forms> forms;
    std::shared_ptr<const Counts> counts;

    // Whether two lists are of the same forms.
    bool lies_as(const Reading& other) const { return forms == other.forms || *forms == *other.forms; }
    // The same, at the same addresses.
    bool operator==(const Reading& other) const { return addresses == other.addresses && lies_as(other); }
};

void bind_tensors(pybind11::module_& module);

}  // namespace fp16opt
