// What was read of a list of torch's tensors: see bindings_tensors.cpp.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <tuple>
#include <vector>

namespace fp16opt {

// The classes, dtypes, devices, shapes and strides of the entries of one list, and which are None.
struct Forms {
    // Of one tensor: its class, dtype, device, dimensions.
    using Form = std::tuple<PyObject*, uint64_t, int32_t, int32_t, int32_t>;
    static constexpr Form kAbsent{nullptr, 0, 0, 0, 0};

    std::vector<Form> each;
    std::vector<int64_t> sizes;           // of one tensor after the other, its shape and its strides
    std::vector<pybind11::object> kept;   // the classes

    bool operator==(const Forms& other) const { return each == other.each && sizes == other.sizes; }
    // Keeps a class alive.
    void keep(pybind11::handle type) { add(kept, type); }
    // The classes of the tensors, each once.
    std::vector<pybind11::object> types() const {
        std::vector<pybind11::object> found;
        for (const Form& form : each) {
            if (form != kAbsent) add(found, std::get<0>(form));
        }
        return found;
    }

private:
    static void add(std::vector<pybind11::object>& types, pybind11::handle type) {
        const auto is_type = [type](const pybind11::object& one) { return one.is(type); };
        if (std::none_of(types.begin(), types.end(), is_type)) types.push_back(pybind11::reinterpret_borrow<pybind11::object>(type));
    }
};

// How often each tensor of a list was written; -1 for None.
using Counts = std::vector<int64_t>;

// How the entries of one list lay in memory when they were read. It keeps none of them alive.
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
