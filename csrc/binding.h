// Functions and classes of C++ for Python, by its C API alone: what this module needs of that, and nothing else. A general
// library for it takes longer to compile than all kernels of one SIMD level. Names are pybind11's where they mean the same.
//
// A function is called by position. Its parameters say what may come: numbers, sequences of them, objects of a kind below, or
// of a class that was bound before. Anything else is a TypeError, and a number that does not fit an OverflowError.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace fp16opt {
namespace py {

// -- objects ---------------------------------------------------------------------------------------------------------

class handle {  // borrowed
public:
    handle() = default;
    handle(PyObject* at) : ptr_(at) {}
    PyObject* ptr() const { return ptr_; }
    bool is(handle other) const { return ptr_ == other.ptr_; }
    bool is_none() const { return ptr_ == Py_None; }
    explicit operator bool() const { return ptr_ != nullptr; }
    handle inc_ref() const {
        Py_XINCREF(ptr_);
        return *this;
    }
    template <class T>
    decltype(auto) cast() const;
    inline class object attr(const char* name) const;
    inline class object operator()() const;

protected:
    PyObject* ptr_ = nullptr;
};

class object : public handle {  // owned
public:
    object() = default;
    object(const object& other) : handle(other.inc_ref()) {}
    object(object&& other) noexcept : handle(other.release()) {}
    object& operator=(object other) noexcept {
        std::swap(ptr_, other.ptr_);
        return *this;
    }
    ~object() { Py_XDECREF(ptr_); }
    handle release() { return std::exchange(ptr_, nullptr); }
    static bool serves(handle) { return true; }

protected:
    struct Owned {};
    object(handle owned, Owned) : handle(owned) {}
    template <class T>
    friend T reinterpret_steal(handle owned);
};

template <class T>
T reinterpret_steal(handle owned) {
    T result;
    static_cast<object&>(result) = object(owned, object::Owned{});
    return result;
}
template <class T>
T reinterpret_borrow(handle from) {
    return reinterpret_steal<T>(from.inc_ref());
}

// Objects of one kind.
struct bool_ : object {
    static bool serves(handle o) { return PyBool_Check(o.ptr()) != 0; }
};
struct int_ : object {
    explicit inline int_(long value);
};
struct sequence : object {
    static bool serves(handle o) { return PySequence_Check(o.ptr()) != 0; }
};
struct list : object {
    list() = default;
    explicit inline list(size_t size);  // its entries are to be set before anybody sees it
    static bool serves(handle o) { return PyList_Check(o.ptr()) != 0; }
    size_t size() const { return size_t(PyList_GET_SIZE(ptr())); }
    PyObject* const* begin() const { return PySequence_Fast_ITEMS(ptr()); }
    PyObject* const* end() const { return begin() + size(); }
};
struct tuple : object {
    static bool serves(handle o) { return PyTuple_Check(o.ptr()) != 0; }
    size_t size() const { return size_t(PyTuple_GET_SIZE(ptr())); }
    PyObject* const* begin() const { return PySequence_Fast_ITEMS(ptr()); }
    PyObject* const* end() const { return begin() + size(); }
    handle operator[](size_t i) const { return begin()[i]; }
};
struct bytes : object {
    static bool serves(handle o) { return PyBytes_Check(o.ptr()) != 0; }
    std::string content() const { return std::string(PyBytes_AS_STRING(ptr()), size_t(PyBytes_GET_SIZE(ptr()))); }
};
struct dict : object {
    static bool serves(handle o) { return PyDict_Check(o.ptr()) != 0; }
};
struct capsule : object {
    static bool serves(handle o) { return PyCapsule_CheckExact(o.ptr()) != 0; }
    const char* name() const { return PyCapsule_GetName(ptr()); }
    void* get_pointer() const { return PyCapsule_GetPointer(ptr(), name()); }
};
struct type : object {
    static bool serves(handle o) { return PyType_Check(o.ptr()) != 0; }
    static type of(handle o) { return reinterpret_borrow<type>(reinterpret_cast<PyObject*>(Py_TYPE(o.ptr()))); }
};

// -- errors ----------------------------------------------------------------------------------------------------------

// What Python has raised. On the way out it is kept here: objects that are freed meanwhile may run code.
class error_already_set : public std::exception {
public:
    error_already_set() {
        PyObject *type, *value, *trace;
        PyErr_Fetch(&type, &value, &trace);
        type_ = reinterpret_steal<object>(type);
        value_ = reinterpret_steal<object>(value);
        trace_ = reinterpret_steal<object>(trace);
    }
    void restore() { PyErr_Restore(type_.release().ptr(), value_.release().ptr(), trace_.release().ptr()); }
    const char* what() const noexcept override { return "Python has raised an error"; }

private:
    object type_, value_, trace_;
};
struct type_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};
struct value_error : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

// Makes Python's error of the exception that is being handled.
inline void raise_current() {
    try {
        throw;
    } catch (error_already_set& e) {
        e.restore();
    } catch (const type_error& e) {
        PyErr_SetString(PyExc_TypeError, e.what());
    } catch (const std::invalid_argument& e) {
        PyErr_SetString(PyExc_ValueError, e.what());
    } catch (const std::out_of_range& e) {
        PyErr_SetString(PyExc_IndexError, e.what());
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& e) {
        PyErr_SetString(PyExc_RuntimeError, e.what());
    }
}

// A new object that the C API gave, or what it raised.
inline object checked(PyObject* made) {
    if (made == nullptr) throw error_already_set();
    return reinterpret_steal<object>(made);
}
inline object handle::attr(const char* name) const { return checked(PyObject_GetAttrString(ptr_, name)); }
inline object handle::operator()() const { return checked(PyObject_CallNoArgs(ptr_)); }
inline int_::int_(long value) : object(checked(PyLong_FromLong(value))) {}
inline list::list(size_t size) : object(checked(PyList_New(Py_ssize_t(size)))) {}
template <class... T>
tuple tuple_of(const T&... items) {
    return reinterpret_steal<tuple>(checked(PyTuple_Pack(Py_ssize_t(sizeof...(T)), items.ptr()...)).release());
}
inline object none() { return reinterpret_borrow<object>(Py_None); }

// What Python has raised stands again at the end, whatever is raised in between.
class error_scope {
public:
    error_scope() { PyErr_Fetch(&type_, &value_, &trace_); }
    error_scope(const error_scope&) = delete;
    ~error_scope() { PyErr_Restore(type_, value_, trace_); }

private:
    PyObject *type_, *value_, *trace_;
};

// Lets other threads of Python run.
class gil_scoped_release {
public:
    gil_scoped_release() : state_(PyEval_SaveThread()) {}
    gil_scoped_release(const gil_scoped_release&) = delete;
    ~gil_scoped_release() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {  // Python has ended, and this thread with it: that unwinds, and frames of C++ own objects of Python's
            for (;;) pause();
        }
    }

private:
    PyThreadState* state_;
};

// -- classes of ours -------------------------------------------------------------------------------------------------

template <class T>
struct Instance {
    PyObject_HEAD
    T* value;  // owned; null before __init__
};

template <class T>
PyTypeObject*& type_of() {
    static PyTypeObject* type = nullptr;
    return type;
}

template <class T>
bool isinstance(handle o) {
    if constexpr (std::is_base_of_v<object, T>) {
        return T::serves(o);
    } else {
        return Py_TYPE(o.ptr()) == type_of<T>();
    }
}

// A new object that owns `value`.
template <class T>
object owning(std::unique_ptr<T> value) {
    object made = checked(type_of<T>()->tp_alloc(type_of<T>(), 0));
    reinterpret_cast<Instance<T>*>(made.ptr())->value = value.release();
    return made;
}

// -- from Python -----------------------------------------------------------------------------------------------------

template <class T>
struct As {};

inline type_error unexpected(const char* wanted, handle came) {
    return type_error(std::string("expected ") + wanted + ", got " + Py_TYPE(came.ptr())->tp_name);
}

inline handle read(As<handle>, handle o) { return o; }
inline bool read(As<bool>, handle o) {
    const int truth = PyObject_IsTrue(o.ptr());
    if (truth < 0) throw error_already_set();
    return truth != 0;
}
inline const char* read(As<const char*>, handle o) {
    const char* text = PyUnicode_AsUTF8(o.ptr());
    if (text == nullptr) throw error_already_set();
    return text;
}

template <class T>
decltype(auto) read(As<T>, handle o) {
    if constexpr (std::is_integral_v<T>) {
        typedef std::conditional_t<std::is_signed_v<T>, long long, unsigned long long> Wide;
        if (!PyLong_Check(o.ptr())) throw unexpected("an int", o);
        Wide wide;
        if constexpr (std::is_signed_v<T>) {
            wide = PyLong_AsLongLong(o.ptr());
        } else {
            wide = PyLong_AsUnsignedLongLong(o.ptr());
        }
        if (wide == Wide(-1) && PyErr_Occurred() != nullptr) throw error_already_set();
        if (wide < Wide(std::numeric_limits<T>::min()) || wide > Wide(std::numeric_limits<T>::max())) {
            PyErr_Format(PyExc_OverflowError, "%S does not fit into %d bits", o.ptr(), int(8 * sizeof(T)));
            throw error_already_set();
        }
        return T(wide);
    } else if constexpr (std::is_floating_point_v<T>) {
        const double value = PyFloat_AsDouble(o.ptr());
        if (value == -1.0 && PyErr_Occurred() != nullptr) throw error_already_set();
        return T(value);
    } else if constexpr (std::is_base_of_v<object, T>) {
        if (!T::serves(o)) throw unexpected("another kind of argument", o);
        return reinterpret_borrow<T>(o);
    } else {
        T* value = isinstance<T>(o) ? reinterpret_cast<Instance<T>*>(o.ptr())->value : nullptr;
        if (value == nullptr) throw unexpected(type_of<T>()->tp_name, o);
        return static_cast<T&>(*value);
    }
}

// The items of a sequence as they are now: reading one may run somebody's code.
inline std::vector<object> items_of(handle o) {
    const object fast = checked(PySequence_Fast(o.ptr(), "expected a sequence"));
    std::vector<object> items;
    items.reserve(size_t(PySequence_Fast_GET_SIZE(fast.ptr())));
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(fast.ptr()); ++i) {
        items.push_back(reinterpret_borrow<object>(PySequence_Fast_GET_ITEM(fast.ptr(), i)));
    }
    return items;
}

template <class T>
std::vector<T> read(As<std::vector<T>>, handle o) {
    std::vector<T> result;
    for (const object& item : items_of(o)) result.push_back(read(As<T>{}, item));
    return result;
}
template <class T>
std::optional<T> read(As<std::optional<T>>, handle o) {
    if (o.is_none()) return std::nullopt;
    return read(As<T>{}, o);
}
template <class... T, size_t... I>
std::tuple<T...> read_items(const std::vector<object>& items, std::index_sequence<I...>) {
    return {read(As<T>{}, items[I])...};
}
template <class... T>
std::tuple<T...> read(As<std::tuple<T...>>, handle o) {
    const std::vector<object> items = items_of(o);
    if (items.size() != sizeof...(T)) {
        throw type_error("expected " + std::to_string(sizeof...(T)) + " values, got " + std::to_string(items.size()));
    }
    return read_items<T...>(items, std::index_sequence_for<T...>{});
}

template <class T>
decltype(auto) handle::cast() const {
    return read(As<std::decay_t<T>>{}, *this);
}

// -- to Python -------------------------------------------------------------------------------------------------------

inline object written(object o) { return o; }
inline object written(bool value) { return checked(PyBool_FromLong(value)); }
inline object written(double value) { return checked(PyFloat_FromDouble(value)); }
inline object written(float value) { return written(double(value)); }
inline object written(const char* text) { return checked(PyUnicode_FromString(text)); }
inline object written(const std::string& text) { return written(text.c_str()); }
template <class T>
object written(const std::vector<T>& values) {
    object result = checked(PyList_New(0));
    for (const T& value : values) {
        if (PyList_Append(result.ptr(), written(value).ptr()) != 0) throw error_already_set();
    }
    return result;
}

// -- functions -------------------------------------------------------------------------------------------------------

template <class F>
struct Signature : Signature<decltype(&F::operator())> {};
template <class R, class... A>
struct Signature<R (*)(A...)> {
    typedef R Result;
    typedef std::tuple<As<std::decay_t<A>>...> Arguments;
};
template <class C, class R, class... A>
struct Signature<R (C::*)(A...) const> : Signature<R (*)(A...)> {};

template <class F>
struct Function {
    PyMethodDef definition;
    F function;

    static PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t count) {
        constexpr size_t kWanted = std::tuple_size_v<typename Signature<F>::Arguments>;
        try {
            const auto* of = static_cast<const Function*>(PyCapsule_GetPointer(self, nullptr));
            if (size_t(count) != kWanted) {
                throw type_error(std::string(of->definition.ml_name) + " takes " + std::to_string(kWanted) + " arguments, got " +
                                 std::to_string(count));
            }
            return of->with(given, std::make_index_sequence<kWanted>{}).release().ptr();
        } catch (...) {
            raise_current();
            return nullptr;
        }
    }

private:
    template <size_t... I>
    object with(PyObject* const* given, std::index_sequence<I...>) const {
        (void)given;
        typedef typename Signature<F>::Arguments Arguments;
        if constexpr (std::is_void_v<typename Signature<F>::Result>) {
            function(read(std::tuple_element_t<I, Arguments>{}, given[I])...);
            return none();
        } else {
            return written(function(read(std::tuple_element_t<I, Arguments>{}, given[I])...));
        }
    }
};

// It lives as long as the process does, as the module.
template <class F>
object function(const char* name, F f) {
    auto* made = new Function<F>{{}, std::move(f)};
    const auto entry = reinterpret_cast<void (*)()>(&Function<F>::call);  // by way of it no compiler warns
    made->definition = {name, reinterpret_cast<PyCFunction>(entry), METH_FASTCALL, nullptr};
    const object self = checked(PyCapsule_New(made, nullptr, nullptr));
    return checked(PyCFunction_New(&made->definition, self.ptr()));
}

inline void set(handle owner, const char* name, const object& value) {
    if (PyObject_SetAttrString(owner.ptr(), name, value.ptr()) != 0) throw error_already_set();
}

struct module_ : handle {
    using handle::handle;
    template <class F>
    void def(const char* name, F f) {
        set(*this, name, function(name, std::move(f)));
    }
};

template <class F>
struct Maker {
    F make;
};
// __init__ by a constructor, and by a function.
template <class... A>
struct Constructor {};
template <class... A>
Constructor<A...> init() {
    return {};
}
template <class T, class... A>
Maker<T (*)(A...)> init(T (*make)(A...)) {
    return {make};
}

template <class T>
class class_ {
public:
    class_(module_ module, const char* name) {
        static const std::string full = std::string(PyModule_GetName(module.ptr())) + "." + name;  // 3.10 takes no copy
        PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(&PyType_GenericNew)},
                               {Py_tp_dealloc, reinterpret_cast<void*>(&deallocate)},
                               {0, nullptr}};
        PyType_Spec spec = {full.c_str(), int(sizeof(Instance<T>)), 0, Py_TPFLAGS_DEFAULT, slots};
        type_ = checked(PyType_FromSpec(&spec));
        type_of<T>() = reinterpret_cast<PyTypeObject*>(type_.ptr());
        set(module, name, type_);
        type_.inc_ref();  // for type_of
    }
    // `f` takes the object first.
    template <class F>
    class_& def(const char* name, F f) {
        set(type_, name, checked(PyInstanceMethod_New(function(name, std::move(f)).ptr())));
        return *this;
    }
    template <class R, class... A>
    class_& def(const char* name, R (T::*method)(A...)) {
        return def(name, [method](T& self, A... given) -> R { return (self.*method)(std::forward<A>(given)...); });
    }
    template <class R, class... A>
    class_& def(const char* name, R (T::*method)(A...) const) {
        return def(name, [method](T& self, A... given) -> R { return (self.*method)(std::forward<A>(given)...); });
    }
    template <class... A>
    class_& def(Constructor<A...>) {
        return def("__init__", [](handle self, A... given) { put(self, new T(std::forward<A>(given)...)); });
    }
    template <class... A>
    class_& def(Maker<T (*)(A...)> maker) {
        return def("__init__", [maker](handle self, A... given) { put(self, new T(maker.make(std::forward<A>(given)...))); });
    }

private:
    static void put(handle self, T* made) {
        std::unique_ptr<T> value(made);
        if (!isinstance<T>(self)) throw unexpected(type_of<T>()->tp_name, self);
        T*& place = reinterpret_cast<Instance<T>*>(self.ptr())->value;
        if (place != nullptr) throw type_error("__init__ was called before");  // somebody may be using what it made
        place = value.release();
    }
    static void deallocate(PyObject* self) {
        PyTypeObject* type = Py_TYPE(self);
        delete reinterpret_cast<Instance<T>*>(self)->value;
        type->tp_free(self);
        Py_DECREF(type);
    }

    object type_;
};

// The module `name`, filled by `fill(module_)`. What that throws is an ImportError.
inline PyObject* module_filled(PyModuleDef& definition, void (*fill)(module_ module)) {
    try {
        object module = checked(PyModule_Create(&definition));
        fill(module.ptr());
        return module.release().ptr();
    } catch (error_already_set& e) {
        e.restore();
    } catch (const std::exception& e) {
        PyErr_SetString(PyExc_ImportError, e.what());
    }
    return nullptr;
}

}  // namespace py
}  // namespace fp16opt
