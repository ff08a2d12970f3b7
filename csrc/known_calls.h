// Calls that passed every check once, to be made again where nothing that was checked is other than it was.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "seen_lists.h"

namespace fp16opt {
namespace {

// An operation of this module on lists of tensors. What its call has behind these are tensors, which go as addresses, and values.
struct KnownCall {
    std::string name;  // of the operation
    py::object function, table, length;
    py::object lists, tensors;   // SeenLists; the latter of the tensors behind the lists, as one list, or None
    std::vector<py::type> types;     // of all that is behind the lists
    std::vector<py::object> texts;  // of these, which say what is to be done; null for others
    std::vector<uint8_t> is_tensor;
    size_t tensor_count;
    std::vector<size_t> results;  // which of these are written
    std::vector<size_t> written;  // which lists are
};

// Tells autograd that tensors were written, by `count`, which takes a list of them; where it raises, by `count_each`.
void count_writes(const py::object& count, const py::object& count_each, const py::list& written) {
    if (written.size() == 0) return;
    py::object done = py::reinterpret_steal<py::object>(PyObject_CallOneArg(count.ptr(), written.ptr()));
    if (done) return;
    if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) throw py::error_already_set();
    PyErr_Clear();
    py::checked(PyObject_CallOneArg(count_each.ptr(), written.ptr()));
}

// What one call site knows. For every call the dtypes, devices, shapes and strides of all tensors are compared again, and their
// addresses are read again; numbers and flags may be others, of the same types.
class KnownCalls {
public:
    // `threads` says how many to use; the others are count_writes'.
    KnownCalls(py::object threads, py::object count, py::object count_each)
        : threads_(std::move(threads)), count_(std::move(count)), count_each_(std::move(count_each)) {}

    // One that was made. `places`: of tensors among the arguments behind the lists.
    void add(const char* name, py::object function, py::object table, py::object length, py::object lists, py::object tensors,
             const py::tuple& arguments, const std::vector<size_t>& places, std::vector<size_t> results,
             std::vector<size_t> written) {
        auto known = std::make_shared<KnownCall>(KnownCall{name, std::move(function), std::move(table), std::move(length),
                                                           std::move(lists), std::move(tensors), {}, {}, {}, places.size(),
                                                           std::move(results), std::move(written)});
        for (py::handle argument : arguments) {
            known->types.push_back(py::type::of(argument));
            const bool is_text = PyUnicode_Check(argument.ptr()) != 0;
            known->texts.push_back(is_text ? py::reinterpret_borrow<py::object>(argument) : py::object());
        }
        known->is_tensor.resize(arguments.size());
        for (size_t place : places) known->is_tensor.at(place) = 1;
        for (auto& other : known_) {
            if (other->name == known->name) {
                other = std::move(known);
                return;
            }
        }
        known_.push_back(std::move(known));
    }

    // Makes the call if it is known, and counts what was written: results, and with `writes` tensors of the lists. Whether it
    // was made.
    bool repeats(const char* name, const py::tuple& lists, const py::tuple& arguments, bool writes) const {
        for (const auto& known : known_) {
            if (known->name == name) return repeat(known, lists, arguments, writes);
        }
        return false;
    }

private:
    // It holds the call: another thread may have this site forget it meanwhile.
    bool repeat(const std::shared_ptr<const KnownCall> known, const py::tuple& lists, const py::tuple& arguments,
                bool writes) const {
        if (arguments.size() != known->types.size()) return false;
        py::list tensors(known->tensor_count);
        size_t filled = 0;
        for (size_t k = 0; k < arguments.size(); ++k) {
            if (!py::type::of(arguments[k]).is(known->types[k])) return false;
            if (known->texts[k] && PyUnicode_Compare(known->texts[k].ptr(), arguments[k].ptr()) != 0) return false;
            if (known->is_tensor[k] != 0) PyList_SET_ITEM(tensors.ptr(), Py_ssize_t(filled++), arguments[k].inc_ref().ptr());
        }
        auto behind = filled == 0 ? nullptr : known->tensors.cast<SeenLists&>().find(py::tuple_of(tensors));
        if (filled != 0 && behind == nullptr) return false;
        auto in_lists = known->lists.cast<SeenLists&>().find(lists);
        if (in_lists == nullptr) return false;

        py::list written = written_of(*known, *in_lists, arguments, writes);
        const py::object addresses = py::owning(std::move(in_lists)), threads = threads_();
        std::vector<py::object> given{known->table, addresses, threads, known->length};
        filled = 0;
        for (size_t k = 0; k < arguments.size(); ++k) {
            const bool is_tensor = known->is_tensor[k] != 0;
            given.push_back(is_tensor ? py::checked(PyLong_FromVoidPtr(behind->lists[0][filled++]))
                                      : py::reinterpret_borrow<py::object>(arguments[k]));
        }
        std::vector<PyObject*> plain;
        for (const py::object& one : given) plain.push_back(one.ptr());
        py::checked(PyObject_Vectorcall(known->function.ptr(), plain.data(), plain.size(), nullptr));
        count_writes(count_, count_each_, written);
        return true;
    }

    static py::list written_of(const KnownCall& known, const Addresses& addresses, const py::tuple& arguments, bool writes) {
        py::list written(0);
        const auto add = [&](py::handle tensor) {
            if (PyList_Append(written.ptr(), tensor.ptr()) != 0) throw py::error_already_set();
        };
        for (size_t place : known.results) add(arguments[place]);
        for (size_t k = 0; writes && k < known.written.size(); ++k) {
            for (PyObject* tensor : addresses.held[known.written[k]]->tensors) add(tensor);
        }
        return written;
    }

    py::object threads_, count_, count_each_;
    std::vector<std::shared_ptr<const KnownCall>> known_;
};

void bind_known_calls(py::module_& module) {
    py::class_<KnownCalls>(module, "KnownCalls")
        .def(py::init<py::object, py::object, py::object>())
        .def("add", &KnownCalls::add)
        .def("repeats", &KnownCalls::repeats);
}

}  // namespace
}  // namespace fp16opt
