// How the module reads the gradients and the version counters of many tensors: by the getters behind torch's own attributes,
// without the interpreter's work for each.
#pragma once

#include <utility>

#include "ahead.h"
#include "seen_lists.h"

namespace fp16opt {
namespace {

// What `Tensor.NAME` reads and sets, of an attribute that is written in C.
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
    // Throws what torch raises.
    void set(PyObject* tensor, PyObject* value) const {
        if (set_->set(tensor, value, set_->closure) != 0) throw py::error_already_set();
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
        py::list found(tensors.size());
        for_each(tensors, grad_, [&](Py_ssize_t i, const py::object& tensor, Pass& pass) {
            PyList_SET_ITEM(found.ptr(), i, grad_of(pass, tensor).release().ptr());
            return true;
        });
        return found;
    }

    // `.grad` of each, and as versions() of these, None also where one counts none.
    py::tuple see(const py::list& tensors) const {
        py::list found(tensors.size()), then(tensors.size());
        bool counted = true;
        Quiet quiet(quiet_);
        Pass grad_pass(version_, tensor_type_, quiet);
        for_each(tensors, grad_, quiet, [&](Py_ssize_t i, const py::object& tensor, Pass& pass) {
            const py::object grad = grad_of(pass, tensor);
            PyList_SET_ITEM(found.ptr(), i, grad.inc_ref().ptr());
            counted = counted && (grad.is_none() || grad_pass.counts_its_own(grad.ptr()));
            if (!counted) return true;
            try {
                PyList_SET_ITEM(then.ptr(), i, version_of(grad).release().ptr());
            } catch (py::error_already_set& raised) {
                let_pass_if_uncounted(raised);
                counted = false;
            }
            return true;
        });
        return py::tuple_of(found, counted ? py::object(then) : py::none());
    }

    // How many are not None.
    static long count_there(const py::list& tensors) {
        const Items items(tensors.ptr());
        long found = 0;
        for (Py_ssize_t i = 0; i < items.size(); ++i) found += items.at(i) != Py_None;
        return found;
    }

    // Sets `.grad` of each.
    void set_gradients(const py::list& tensors, const py::list& grads) const {
        const Items given(grads.ptr());
        if (tensors.size() != grads.size()) throw py::value_error("there must be one gradient for each tensor");
        Ahead<false> ahead;
        for_each(tensors, grad_, [&](Py_ssize_t i, const py::object& tensor, Pass& pass) {
            ahead(i, given);
            pass.counts_its_own(tensor.ptr());  // or it throws
            PyObject* grad = given.at(i);
            if (grad == nullptr) throw py::value_error("a list changed while it was read");
            grad_.set(tensor.ptr(), py::reinterpret_borrow<py::object>(grad).ptr());
            return true;
        });
    }

    // Whether a `.grad` is there.
    bool have_gradients(const py::list& tensors) const {
        return !for_each(tensors, grad_, [&](Py_ssize_t, const py::object& tensor, Pass& pass) {
            return grad_of(pass, tensor).is_none();
        });
    }

    // `_version` of each, -1 for None; None where one does not count its own writes.
    py::object versions(const py::list& tensors) const {
        py::list found(tensors.size());
        const bool counted = for_each(tensors, version_, [&](Py_ssize_t i, const py::object& tensor, Pass& pass) {
            if (!tensor.is_none() && !pass.counts_its_own(tensor.ptr())) return false;
            PyList_SET_ITEM(found.ptr(), i, version_of(tensor).release().ptr());
            return true;
        });
        return counted ? py::object(found) : py::none();
    }

    // Whether each counts its own writes, and is in the version that stands in `then`.
    bool have_versions(const py::list& tensors, const py::list& then) const {
        const Items versions(then.ptr());
        if (tensors.size() != then.size()) return false;
        return for_each(tensors, version_, [&](Py_ssize_t i, const py::object& tensor, Pass& pass) {
            return is_in_version(pass, tensor, versions.at(i));
        });
    }

    // Whether `.grad` of each is that tensor, or None, and as have_versions; not where one counts none.
    bool hold_gradients(const py::list& tensors, const py::list& grads, const py::list& then) const {
        if (tensors.size() != grads.size() || tensors.size() != then.size()) return false;
        const Items seen(grads.ptr()), versions(then.ptr());
        Quiet quiet(quiet_);
        Pass grad_pass(version_, tensor_type_, quiet);
        Ahead<false> ahead;
        return for_each(tensors, grad_, quiet, [&](Py_ssize_t i, const py::object& tensor, Pass& pass) {
            ahead(i, seen);
            const py::object grad = grad_of(pass, tensor);
            if (grad.ptr() != seen.at(i)) return false;
            try {
                return is_in_version(grad_pass, grad, versions.at(i));
            } catch (py::error_already_set& raised) {
                let_pass_if_uncounted(raised);
                return false;
            }
        });
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
    // A tensor that was made in inference mode counts no versions: torch raises RuntimeError. Throws what else was raised.
    static void let_pass_if_uncounted(py::error_already_set& raised) {
        raised.restore();
        if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) throw py::error_already_set();
        PyErr_Clear();
    }

    py::object one_gradient(const py::object& tensor) const {
        if (!PyObject_TypeCheck(tensor.ptr(), grad_.owner())) throw py::type_error("not a tensor");
        return grad_(tensor.ptr());
    }

    // Calls `look(i, tensor, pass)` for each, in their order, until it says false; whether it never did. Getters may run other
    // code, which changes lists: then this throws.
    template <class Look>
    bool for_each(const py::list& tensors, const Getter& getter, Look&& look) const {
        Quiet quiet(quiet_);
        return for_each(tensors, getter, quiet, look);
    }
    // The same in a context that `look` may use as well.
    template <class Look>
    bool for_each(const py::list& tensors, const Getter& getter, Quiet& quiet, Look&& look) const {
        const Items items(tensors.ptr());
        const Py_ssize_t count = items.size();
        Pass pass(getter, tensor_type_, quiet);
        Ahead<false> ahead;
        for (Py_ssize_t i = 0; i < count; ++i) {
            ahead(i, items);
            if (items.size() != count) throw py::value_error("a list changed while it was read");
            const auto tensor = py::reinterpret_borrow<py::object>(items.at(i));
            if (!look(i, tensor, pass)) return false;
        }
        return true;
    }

    py::object grad_of(Pass& pass, const py::object& tensor) const {
        pass.counts_its_own(tensor.ptr());  // or it throws
        return grad_(tensor.ptr());
    }

    py::object version_of(const py::object& tensor) const { return tensor.is_none() ? py::int_(-1) : version_(tensor.ptr()); }

    bool is_in_version(Pass& pass, const py::object& tensor, PyObject* then) const {
        if (then == nullptr || (!tensor.is_none() && !pass.counts_its_own(tensor.ptr()))) return false;
        const auto wanted = py::reinterpret_borrow<py::object>(then);
        const int same = PyObject_RichCompareBool(version_of(tensor).ptr(), wanted.ptr(), Py_EQ);
        if (same < 0) throw py::error_already_set();
        return same != 0;
    }

    py::type tensor_type_;
    Getter grad_, version_;
    py::object quiet_;
};

void bind_tensor_counters(py::module_& module) {
    module.def("learn_tensors", &learn_tensors);
    py::class_<TensorReader>(module, "TensorReader")
        .def(py::init<py::type, const py::object&, const py::object&, py::object>())
        .def("asked_gradient", &TensorReader::asked_gradient)
        .def("count_there", [](const TensorReader&, const py::list& tensors) { return py::int_(TensorReader::count_there(tensors)); })
        .def("gradients", &TensorReader::gradients)
        .def("see", &TensorReader::see)
        .def("set_gradients", &TensorReader::set_gradients)
        .def("have_gradients", &TensorReader::have_gradients)
        .def("versions", &TensorReader::versions)
        .def("have_versions", &TensorReader::have_versions)
        .def("hold_gradients", &TensorReader::hold_gradients);
}

}  // namespace
}  // namespace fp16opt
