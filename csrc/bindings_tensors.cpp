// What the engine asks of lists of torch's tensors, each in one call from Python. Where they lie is told by the exchange ABI
// that torch publishes (DLPack 1.x); all else comes from the getters and methods by which torch shows its own attributes to
// Python. Nothing here knows how torch or CPython lay out what they hold.
#include "bindings_tensors.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace py = pybind11;

namespace fp16opt {
namespace {

// -- DLPack's exchange ABI, as published: https://dmlc.github.io/dlpack/latest/c_api.html -------------------------------

struct DLDevice {
    int32_t type, id;
};
struct DLDataType {
    uint8_t code, bits;
    uint16_t lanes;
};
struct DLTensor {
    void* data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
};
struct DLPackHeader {
    uint32_t major, minor;
    DLPackHeader* previous;
};
using Describe = int (*)(void* tensor, DLTensor* out);
struct DLPackExchange {
    DLPackHeader header;
    void (*allocate)(), (*export_owned)(), (*import_owned)();
    Describe describe;
    void (*stream)();
};

Describe describe_of(const py::object& capsule) {
    auto* header = static_cast<DLPackHeader*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (header == nullptr) throw py::error_already_set();
    while (header != nullptr && header->major != 1) header = header->previous;
    return header == nullptr ? nullptr : reinterpret_cast<DLPackExchange*>(header)->describe;
}

// -- lists -------------------------------------------------------------------------------------------------------------

// The items of a list or a tuple, which are not touched: of a thousand tensors that takes longer than the rest. What a getter
// runs may change a list, so each item is kept alive while it is asked for something.
class Items {
public:
    explicit Items(py::handle source)
        : all_(py::reinterpret_steal<py::object>(PySequence_Fast(source.ptr(), "a list or a tuple was expected"))) {
        if (!all_) throw py::error_already_set();
        size_ = PySequence_Fast_GET_SIZE(all_.ptr());
    }
    Py_ssize_t size() const { return size_; }
    PyObject* operator[](Py_ssize_t at) const {
        if (at >= PySequence_Fast_GET_SIZE(all_.ptr())) throw std::runtime_error("the list was changed meanwhile");
        return PySequence_Fast_GET_ITEM(all_.ptr(), at);
    }
    py::object kept(Py_ssize_t at) const { return py::reinterpret_borrow<py::object>((*this)[at]); }
    // Asks for the memory of an item that will be needed soon, if there is one.
    void prefetch(Py_ssize_t at) const {
#if defined(__GNUC__)
        if (at < size_) __builtin_prefetch((*this)[at]);
#endif
    }

private:
    py::object all_;
    Py_ssize_t size_ = 0;
};

// One of torch's attributes, read and set as Python does it, but without looking its name up.
class Getter {
public:
    explicit Getter(py::object descriptor)
        : descriptor_(std::move(descriptor)),
          get_(reinterpret_cast<descrgetfunc>(
              PyType_GetSlot(reinterpret_cast<PyTypeObject*>(py::type::handle_of(descriptor_).ptr()), Py_tp_descr_get))),
          set_(reinterpret_cast<descrsetfunc>(
              PyType_GetSlot(reinterpret_cast<PyTypeObject*>(py::type::handle_of(descriptor_).ptr()), Py_tp_descr_set))) {
        if (get_ == nullptr || set_ == nullptr) throw py::type_error("a descriptor that can be set was expected");
    }
    void set(PyObject* of, PyObject* value) const {
        if (set_(descriptor_.ptr(), of, value) != 0) throw py::error_already_set();
    }
    // A new reference, or null with an error set.
    PyObject* operator()(PyObject* of) const {
        return get_(descriptor_.ptr(), of, py::type::handle_of(of).ptr());
    }

private:
    py::object descriptor_;
    descrgetfunc get_;
    descrsetfunc set_;
};

// Sets the attribute of each to the value at its place, or of all to None.
void set_attributes(const Getter& attribute, const py::object& tensors, const py::object& values) {
    const Items all(tensors);
    const std::optional<Items> each = values.is_none() ? std::nullopt : std::make_optional<Items>(values);
    if (each && each->size() != all.size()) throw py::value_error("there must be one value for each tensor");
    for (Py_ssize_t i = 0; i < all.size(); ++i) {
        attribute.set(all.kept(i).ptr(), (each ? each->kept(i) : py::object(py::none())).ptr());
    }
}

// Has each be of the class at its place.
void set_classes(const py::object& items, const py::object& classes) {
    const Items all(items), wanted(classes);
    if (wanted.size() != all.size()) throw py::value_error("there must be one class for each item");
    const py::str name("__class__");
    for (Py_ssize_t i = 0; i < all.size(); ++i) {
        const py::object item = all.kept(i), kind = wanted.kept(i);
        if (!py::type::handle_of(item).is(kind) && PyObject_SetAttr(item.ptr(), name.ptr(), kind.ptr()) != 0) {
            throw py::error_already_set();
        }
    }
}

py::list attributes_of(const Getter& getter, const py::object& tensors) {
    const Items all(tensors);
    py::list found{size_t(all.size())};
    for (Py_ssize_t i = 0; i < all.size(); ++i) {
        PyObject* const value = getter(all.kept(i).ptr());
        if (value == nullptr) throw py::error_already_set();
        PyList_SET_ITEM(found.ptr(), i, value);
    }
    return found;
}

// Whether the attribute of one is not None.
bool has_attribute(const Getter& getter, const py::object& tensors) {
    const Items all(tensors);
    for (Py_ssize_t i = 0; i < all.size(); ++i) {
        const auto value = py::reinterpret_steal<py::object>(getter(all.kept(i).ptr()));
        if (!value) throw py::error_already_set();
        if (!value.is_none()) return true;
    }
    return false;
}

// How often a tensor was written; -1 for None. One that was made in inference mode counts nothing: 0.
int64_t version_of(const Getter& getter, PyObject* tensor) {
    if (tensor == Py_None) return -1;
    const auto value = py::reinterpret_steal<py::object>(getter(tensor));
    if (!value) {
        if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) throw py::error_already_set();
        PyErr_Clear();
        return 0;
    }
    const long long counted = PyLong_AsLongLong(value.ptr());
    if (counted == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return counted;
}

Counts versions_of(const Getter& getter, const py::object& tensors) {
    const Items all(tensors);
    Counts found;
    found.reserve(size_t(all.size()));
    for (Py_ssize_t i = 0; i < all.size(); ++i) found.push_back(version_of(getter, all.kept(i).ptr()));
    return found;
}

// Whether a list holds the very items of `of` from `start` on, and no others.
bool are_items(const py::object& list, const py::object& of, Py_ssize_t start) {
    const Items one(list), other(of);
    if (start < 0 || start + one.size() > other.size()) return false;
    for (Py_ssize_t i = 0; i < one.size(); ++i) {
        if (one[i] != other[start + i]) return false;
    }
    return true;
}

// Whether each dictionary holds, under `name`, the value at its place.
bool hold(const py::object& dicts, const py::object& name, const py::object& values) {
    const Items each(dicts), wanted(values);
    if (each.size() != wanted.size()) return false;
    for (Py_ssize_t i = 0; i < each.size(); ++i) {
        if (!PyDict_Check(each[i])) return false;
        PyObject* const found = PyDict_GetItemWithError(each[i], name.ptr());
        if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
        if (found != wanted[i]) return false;
    }
    return true;
}

// By item a weak reference; None in the place of None.
py::list references_to(const py::object& items) {
    const Items all(items);
    py::list found{size_t(all.size())};
    for (Py_ssize_t i = 0; i < all.size(); ++i) {
        PyObject* const reference = all[i] == Py_None ? py::none().release().ptr() : PyWeakref_NewRef(all[i], nullptr);
        if (reference == nullptr) throw py::error_already_set();
        PyList_SET_ITEM(found.ptr(), i, reference);
    }
    return found;
}

// Whether one is not None.
bool any_there(const py::object& items) {
    const Items all(items);
    for (Py_ssize_t i = 0; i < all.size(); ++i) {
        if (all[i] != Py_None) return true;
    }
    return false;
}

bool all_there(const py::object& items) {
    const Items all(items);
    for (Py_ssize_t i = 0; i < all.size(); ++i) {
        if (all[i] == Py_None) return false;
    }
    return true;
}

// The classes of which there are items, each once.
py::list types_of(const py::object& items) {
    const Items all(items);
    py::list found;
    for (Py_ssize_t i = 0; i < all.size(); ++i) {
        const auto type = py::type::handle_of(all[i]);
        bool known = false;
        for (py::handle one : found) known |= one.is(type);
        if (!known) found.append(type);
    }
    return found;
}

bool refers_to(PyObject* reference, PyObject* item) {
    if (reference == Py_None) return item == Py_None;
#if PY_VERSION_HEX >= 0x030D0000
    PyObject* there = nullptr;
    if (PyWeakref_GetRef(reference, &there) < 0) throw py::error_already_set();
    Py_XDECREF(there);  // `item` is kept alive: where it is another object, nothing is done with this one
    return there == item;
#else
    PyObject* const there = PyWeakref_GetObject(reference);
    if (there == nullptr) throw py::error_already_set();
    return there == item && there != Py_None;
#endif
}

// Whether weak references are to these very items.
bool are_references_to(const py::object& references, const py::object& items) {
    const Items all(references), now(items);
    if (all.size() != now.size()) return false;
    for (Py_ssize_t i = 0; i < all.size(); ++i) {
        if (!refers_to(all[i], now[i])) return false;
    }
    return true;
}

// -- how tensors lie in memory -----------------------------------------------------------------------------------------

// Reads lists of tensors.
class Reader {
public:
    // `exchange` is the capsule of `Tensor.__dlpack_c_exchange_api__`, `is_neg` torch's method: DLPack does not tell that the
    // values of a tensor are the negatives of what its memory holds.
    Reader(const py::object& exchange, py::object is_neg, const Getter& grad, const Getter& version)
        : describe_(describe_of(exchange)), is_neg_(std::move(is_neg)), grad_(grad), version_(version) {
        if (describe_ == nullptr) throw py::value_error("the exchange API does not describe tensors");
    }

    // None where an entry is neither None nor a tensor that can be described, or is the negative of its memory. `like` was read
    // before, of a list that is probably of the same forms; `same` says that it was of the very same tensors: those that lie
    // where they lay are not asked again for the latter. `counts` has it read their versions too.
    py::object read(const py::object& tensors, const Reading* like, bool same, bool counts) const {
        const Items all(tensors);
        Draft draft(*this, size_t(all.size()), like, counts, true);
        for (Py_ssize_t i = 0; i < all.size(); ++i) {
            all.prefetch(i + kAhead);
            if (!draft.add(all.kept(i), same)) return py::none();
        }
        return draft.reading();
    }

    // The gradients of tensors, and what was read of them, with their versions: each is met once. `known` are weak references to
    // those that `like` was read of, or None. With `counts_alone` only versions and classes are read: such a reading is like none
    // that has told how a list lies.
    std::pair<py::tuple, py::object> gradients(const py::object& tensors, const Reading* like, const py::object& known,
                                               bool counts_alone) const {
        const Items all(tensors);
        std::optional<Items> references = known.is_none() ? std::nullopt : std::make_optional<Items>(known);
        if (references && references->size() != all.size()) references.reset();
        py::tuple grads{size_t(all.size())};
        Draft draft(*this, size_t(all.size()), like, true, !counts_alone);
        bool is_read = true;
        for (Py_ssize_t i = 0; i < all.size(); ++i) {
            all.prefetch(i + kAhead);
            PyObject* const grad = grad_(all.kept(i).ptr());
            if (grad == nullptr) throw py::error_already_set();
            PyTuple_SET_ITEM(grads.ptr(), i, grad);
            const bool same = is_read && references && refers_to((*references)[i], grad);
            is_read = is_read && draft.add(py::reinterpret_borrow<py::object>(grad), same);
        }
        return {std::move(grads), is_read ? draft.reading() : py::none()};
    }

private:
    static constexpr Py_ssize_t kAhead = 8;  // items

    // A reading that is being made.
    class Draft {
    public:
        Draft(const Reader& reader, size_t count, const Reading* like, bool counts, bool describes)
            : reader_(reader), like_(like), describes_(describes), made_(std::make_unique<Reading>()) {
            made_->addresses.reserve(count);
            if (counts) {
                counts_ = std::make_shared<Counts>();
                counts_->reserve(count);
            }
            if (like == nullptr || like->addresses.size() != count) other_ = std::make_shared<Forms>();
        }

        // `same`: whether `like` has been read of this very entry.
        bool add(const py::object& tensor, bool same) {
            DLTensor now{};
            if (tensor.is_none() || !describes_) {
                const py::handle type = tensor.is_none() ? py::handle() : py::type::handle_of(tensor);
                add_form(type, {type.ptr(), 0, 0, 0, 0}, now);
                made_->addresses.push_back(nullptr);
                if (counts_ != nullptr) counts_->push_back(version_of(reader_.version_, tensor.ptr()));
                return true;
            }
            if (reader_.describe_(tensor.ptr(), &now) != 0) {
                PyErr_Clear();
                return false;
            }
            const size_t place = made_->addresses.size();
            void* const at = static_cast<char*>(now.data) + now.byte_offset;
            if (at == nullptr && !std::any_of(now.shape, now.shape + now.ndim, [](int64_t size) { return size == 0; })) {
                return false;  // it has no memory
            }
            const bool stays = same && like_ != nullptr && place < like_->addresses.size() && like_->addresses[place] == at;
            if (!stays && reader_.is_negative(tensor.ptr())) return false;
            const auto type = py::type::handle_of(tensor);
            const uint64_t dtype = uint64_t(now.dtype.code) << 24 | uint64_t(now.dtype.bits) << 16 | now.dtype.lanes;
            add_form(type, {type.ptr(), dtype, now.device.type, now.device.id, now.ndim}, now);
            made_->addresses.push_back(at);
            if (counts_ != nullptr) counts_->push_back(version_of(reader_.version_, tensor.ptr()));
            return true;
        }

        py::object reading() {
            made_->forms = other_ == nullptr ? like_->forms : other_;
            made_->counts = counts_;
            return py::cast(std::move(made_));
        }

    private:
        void add_form(py::handle type, const Forms::Form& form, const DLTensor& now) {
            const size_t place = made_->addresses.size();
            if (other_ == nullptr && !is_known(place, form, now)) {
                const Forms& known = *like_->forms;
                other_ = std::make_shared<Forms>();  // of those before it is what was compared
                other_->each.assign(known.each.begin(), known.each.begin() + std::ptrdiff_t(place));
                other_->sizes.assign(known.sizes.begin(), known.sizes.begin() + std::ptrdiff_t(compared_));
                other_->kept = known.kept;
            }
            if (other_ == nullptr) {
                compared_ += 2 * size_t(now.ndim);
            } else {
                note(type, form, now);
            }
        }

        bool is_known(size_t place, const Forms::Form& form, const DLTensor& now) const {
            const Forms& forms = *like_->forms;
            if (place >= forms.each.size() || forms.each[place] != form) return false;
            const int64_t* const sizes = forms.sizes.data() + compared_;
            return std::equal(now.shape, now.shape + now.ndim, sizes) &&
                   std::equal(now.strides, now.strides + now.ndim, sizes + now.ndim);
        }

        void note(py::handle type, const Forms::Form& form, const DLTensor& now) {
            if (type) other_->keep(type);
            other_->each.push_back(form);
            other_->sizes.insert(other_->sizes.end(), now.shape, now.shape + now.ndim);
            other_->sizes.insert(other_->sizes.end(), now.strides, now.strides + now.ndim);
        }

        const Reader& reader_;
        const Reading* like_;
        const bool describes_;
        std::unique_ptr<Reading> made_;
        std::shared_ptr<Counts> counts_;
        std::shared_ptr<Forms> other_;  // where forms are not those of `like`
        size_t compared_ = 0;           // sizes of `like`
    };

    bool is_negative(PyObject* tensor) const {
        PyObject* const answer = PyObject_Vectorcall(is_neg_.ptr(), &tensor, 1, nullptr);
        if (answer == nullptr) throw py::error_already_set();
        const bool is_true = answer == Py_True;
        Py_DECREF(answer);
        return is_true;
    }

    Describe describe_;
    py::object is_neg_;
    Getter grad_, version_;
};

const Counts& counts_of(const Reading& reading) {
    if (reading.counts == nullptr) throw std::logic_error("versions were not read");
    return *reading.counts;
}

}  // namespace

void bind_tensors(py::module_& module) {
    py::class_<Getter>(module, "Getter").def(py::init<py::object>());
    module.def("attributes_of", &attributes_of);
    module.def("has_attribute", &has_attribute);
    module.def("set_attributes", &set_attributes);
    module.def("set_classes", &set_classes);
    module.def("versions_of", &versions_of);
    module.def("are_items", &are_items);
    module.def("any_there", &any_there);
    module.def("all_there", &all_there);
    module.def("types_of", &types_of);
    module.def("hold", &hold);
    module.def("references_to", &references_to);
    module.def("are_references_to", &are_references_to);
    py::class_<Reading>(module, "Reading")
        .def("__reduce__", [](const Reading&) {  // copies and pickles know nothing
            return py::make_tuple(py::type::of(py::none()), py::tuple());
        })
        .def("lies_as", &Reading::lies_as)
        .def("__eq__", [](const Reading& one, const py::object& other) {
            return py::isinstance<Reading>(other) && one == other.cast<const Reading&>();
        })
        .def("has_dtypes_of", [](const Reading& one, const Reading& other) {
            const auto &mine = one.forms->each, &others = other.forms->each;
            return std::equal(mine.begin(), mine.end(), others.begin(), others.end(), [](const auto& a, const auto& b) {
                return std::get<1>(a) == std::get<1>(b) || a == Forms::kAbsent || b == Forms::kAbsent;
            });
        })
        .def_property_readonly("counts", [](const Reading& reading) { return counts_of(reading); })
        .def("has_counts_of", [](const Reading& one, const Reading& other) { return counts_of(one) == counts_of(other); })
        .def_property_readonly("types", [](const Reading& reading) { return reading.forms->types(); });
    py::class_<Reader>(module, "Reader")
        .def(py::init<py::object, py::object, const Getter&, const Getter&>())
        .def("read", &Reader::read)
        .def("gradients", &Reader::gradients);
}

}  // namespace fp16opt
