// How the module reads the gradients and the version counters of many tensors: by the getters behind torch's own attributes,
// without the interpreter's work for each.
#pragma once

#include <utility>
#include <vector>

#include "seen_lists.h"

namespace fp16opt {
namespace {

// What `Tensor.NAME` reads, of an attribute that is written in C.
class Getter {
public:
    explicit Getter(const py::object& attribute) : held_(attribute) {
        if (!Py_IS_TYPE(attribute.ptr(), &PyGetSetDescr_Type)) throw py::type_error("not an attribute that is written in C");
        const auto* descriptor = reinterpret_cast<PyGetSetDescrObject*>(attribute.ptr());
        owner_ = PyDescr_TYPE(descriptor);
        set_ = descriptor->d_getset;
    }
    PyTypeObject* owner() const { return owner_; }
    // A new reference. Throws what torch raises.
    py::object operator()(PyObject* tensor) const {
        PyObject* value = set_->get(tensor, set_->closure);
        if (value == nullptr) throw py::error_already_set();
        return py::reinterpret_steal<py::object>(value);
    }

private:
    py::object held_;
    PyTypeObject* owner_;
    PyGetSetDef* set_;
};

// From its first use on, torch takes objects of subclasses for plain tensors: it asks each of them otherwise, by name, whether
// it has functions of its own.
class Quiet {
public:
    explicit Quiet(const py::object& context) : context_(context) {}
    Quiet(const Quiet&) = delete;
    ~Quiet() {
        if (!entered_) return;
        const py::error_scope raised;
        Py_XDECREF(PyObject_CallMethod(entered_.ptr(), "__exit__", "OOO", Py_None, Py_None, Py_None));
    }
    void use() {
        if (entered_) return;
        py::object context = context_();
        context.attr("__enter__")();
        entered_ = std::move(context);
    }

private:
    const py::object& context_;
    py::object entered_;
};

// One pass over tensors, of which it looks at each class once: whether its objects can be read, and whether they count their
// own writes. One with a `__torch_dispatch__` of its own, as DTensor's, may leave that to a tensor inside.
class Pass {
public:
    Pass(const Getter& getter, const py::type& plain, Quiet& quiet)
        : owner_(getter.owner()), plain_(plain.ptr()), quiet_(quiet), seen_(reinterpret_cast<PyTypeObject*>(plain_)) {}
    // Throws TypeError where it is no tensor.
    bool counts_its_own(PyObject* tensor) {
        if (Py_TYPE(tensor) != seen_) look_at(tensor);
        return counts_;
    }

private:
    void look_at(PyObject* tensor) {
        if (!PyObject_TypeCheck(tensor, owner_)) throw py::type_error("a list holds something that is not a tensor");
        quiet_.use();
        seen_ = Py_TYPE(tensor);
        const py::object own = py::handle(reinterpret_cast<PyObject*>(seen_)).attr("__torch_dispatch__");
        counts_ = own.is(py::handle(plain_).attr("__torch_dispatch__"));
    }

    PyTypeObject* owner_;
    PyObject* plain_;
    Quiet& quiet_;
    PyTypeObject* seen_;
    bool counts_ = true;
};

class TensorReader {
public:
    // `quiet`: a context in which torch takes objects of subclasses for plain tensors.
    // Throws TypeError where an attribute is not written in C.
    TensorReader(py::type tensor_type, const py::object& grad, const py::object& version, py::object quiet)
        : tensor_type_(std::move(tensor_type)), grad_(grad), version_(version), quiet_(std::move(quiet)) {
        for (const Getter* getter : {&grad_, &version_}) {
            auto* type = reinterpret_cast<PyTypeObject*>(tensor_type_.ptr());
            if (!PyType_IsSubtype(type, getter->owner())) throw py::type_error("not an attribute of tensors");
        }
    }

    // `.grad` of each.
    py::list gradients(const py::list& tensors) const {
        const auto held = hold(tensors);
        py::list found(held.size());
        Quiet quiet(quiet_);
        Pass pass(grad_, tensor_type_, quiet);
        for (size_t i = 0; i < held.size(); ++i) {
            pass.counts_its_own(held[i].ptr());
            PyList_SET_ITEM(found.ptr(), Py_ssize_t(i), grad_(held[i].ptr()).release().ptr());
        }
        return found;
    }

    // `_version` of each, -1 for None; None where one does not count its own writes.
    py::object versions(const py::list& tensors) const {
        const auto held = hold(tensors);
        py::list found(held.size());
        Quiet quiet(quiet_);
        Pass pass(version_, tensor_type_, quiet);
        for (size_t i = 0; i < held.size(); ++i) {
            const bool there = !held[i].is_none();
            if (there && !pass.counts_its_own(held[i].ptr())) return py::none();
            const auto version = there ? version_(held[i].ptr()) : py::int_(-1);
            PyList_SET_ITEM(found.ptr(), Py_ssize_t(i), version.inc_ref().ptr());
        }
        return found;
    }

    // Whether each counts its own writes, and is in the version that stands in `then`.
    bool have_versions(const py::list& tensors, const py::list& then) const {
        const auto held = hold(tensors), versions = hold(then);
        Quiet quiet(quiet_);
        Pass pass(version_, tensor_type_, quiet);
        for (size_t i = 0; i < held.size(); ++i) {
            if (i >= versions.size() || !is_in_version(pass, held[i], versions[i])) return false;
        }
        return held.size() == versions.size();
    }

    // Whether `.grad` of each is that tensor, or None, and as have_versions.
    bool hold_gradients(const py::list& tensors, const py::list& grads, const py::list& then) const {
        const auto held = hold(tensors), seen = hold(grads), versions = hold(then);
        if (held.size() != seen.size() || held.size() != versions.size()) return false;
        Quiet quiet(quiet_);
        Pass pass(grad_, tensor_type_, quiet), grad_pass(version_, tensor_type_, quiet);
        for (size_t i = 0; i < held.size(); ++i) {
            pass.counts_its_own(held[i].ptr());
            if (!grad_(held[i].ptr()).is(seen[i]) || !is_in_version(grad_pass, seen[i], versions[i])) return false;
        }
        return true;
    }

    // `.grad` of one tensor. Where the tensor that `partners`, weak references by id, have for it does not hold the very same,
    // `ask` is called before with that tensor and what this one holds.
    py::object asked_gradient(const py::dict& partners, const py::object& ask, const py::object& tensor) const {
        py::object found = one_gradient(tensor);
        const py::object key = py::checked(PyLong_FromVoidPtr(tensor.ptr()));
        const auto reference = py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(partners.ptr(), key.ptr()));
        if (!reference) {
            if (PyErr_Occurred() != nullptr) throw py::error_already_set();
            return found;
        }
        const py::object partner = reference();
        if (partner.is_none() || (!found.is_none() && one_gradient(partner).is(found))) return found;
        py::checked(PyObject_CallFunctionObjArgs(ask.ptr(), partner.ptr(), found.ptr(), nullptr));
        return one_gradient(tensor);
    }

private:
    py::object one_gradient(const py::object& tensor) const {
        if (!PyObject_TypeCheck(tensor.ptr(), grad_.owner())) throw py::type_error("not a tensor");
        return grad_(tensor.ptr());
    }

    // The entries as they are now: getters may run other code, which changes lists.
    static std::vector<py::object> hold(const py::list& list) {
        PyObject* const* items = PySequence_Fast_ITEMS(list.ptr());
        std::vector<py::object> held;
        held.reserve(list.size());
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.ptr()); ++i) held.push_back(py::reinterpret_borrow<py::object>(items[i]));
        return held;
    }

    bool is_in_version(Pass& pass, const py::object& tensor, const py::object& then) const {
        if (!tensor.is_none() && !pass.counts_its_own(tensor.ptr())) return false;
        const py::object now = tensor.is_none() ? py::int_(-1) : version_(tensor.ptr());
        const int same = PyObject_RichCompareBool(now.ptr(), then.ptr(), Py_EQ);
        if (same < 0) throw py::error_already_set();
        return same != 0;
    }

    py::type tensor_type_;
    Getter grad_, version_;
    py::object quiet_;
};

void bind_tensor_counters(py::module_& module) {
    py::class_<TensorReader>(module, "TensorReader")
        .def(py::init<py::type, const py::object&, const py::object&, py::object>())
        .def("asked_gradient", &TensorReader::asked_gradient)
        .def("gradients", &TensorReader::gradients)
        .def("versions", &TensorReader::versions)
        .def("have_versions", &TensorReader::have_versions)
        .def("hold_gradients", &TensorReader::hold_gradients);
}

}  // namespace
}  // namespace fp16opt
