// How the module gets the addresses of tensors: as lists of integers, or read through DLPack's C exchange table where the
// tensor type offers one.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "ahead.h"
#include "dlpack_exchange.h"

namespace fp16opt {

using Pointers = std::vector<void*>;

namespace {

// Tensors that are held: while an operation runs without Python's lock, another thread may change the lists.
struct Held {
    std::vector<PyObject*> tensors;

    Held() = default;
    Held(const Held&) = delete;
    ~Held() {
        for (PyObject* tensor : tensors) Py_DECREF(tensor);
    }
};

// The addresses of the tensors in each of several lists, at one moment.
struct Addresses {
    std::vector<Pointers> lists;
    std::vector<std::shared_ptr<Held>> held;
};

// A list or tuple as it is at this moment: what is called in between may change it.
class Items {
public:
    explicit Items(PyObject* from) : from_(from), is_list_(PyList_Check(from) != 0) {}
    static bool serves(PyObject* from) { return PyList_Check(from) != 0 || PyTuple_Check(from) != 0; }
    Py_ssize_t size() const { return Py_SIZE(from_); }
    PyObject* const* data() const { return PySequence_Fast_ITEMS(from_); }
    PyObject* at(Py_ssize_t i) const {  // borrowed; null behind the end
        if (i >= Py_SIZE(from_)) return nullptr;
        return is_list_ ? PyList_GET_ITEM(from_, i) : PyTuple_GET_ITEM(from_, i);
    }

private:
    PyObject* from_;
    bool is_list_;
};

struct Kind {
    PyTypeObject* type;
    DLDataType dtype;
    DLDevice device;
    int32_t ndim;
    bool is_single;
    bool has(const DLTensor& now) const {
        return dtype.code == now.dtype.code && dtype.bits == now.dtype.bits && dtype.lanes == now.dtype.lanes &&
               device.device_type == now.device.device_type && device.device_id == now.device.device_id && ndim == now.ndim;
    }
    bool operator==(const Kind& o) const {
        return type == o.type && is_single == o.is_single &&
               has({nullptr, o.device, o.ndim, o.dtype, nullptr, nullptr, 0});
    }
};

// What was seen of a list of tensors: a few kinds, and of each tensor which it is, and its shape and strides.
struct SeenList {
    std::vector<Kind> kinds;
    std::vector<uint32_t> kind_of;
    std::vector<int64_t> extents;  // one tensor after the other
    std::vector<py::type> types;   // held, so that no other type takes the place of one

    void add(const Kind& kind, const DLTensor& now) {
        if (kinds.empty() || !(kinds.back() == kind)) {
            kinds.push_back(kind);
            types.push_back(py::reinterpret_borrow<py::type>(reinterpret_cast<PyObject*>(kind.type)));
        }
        kind_of.push_back(uint32_t(kinds.size() - 1));
        extents.insert(extents.end(), now.shape, now.shape + now.ndim);
        extents.insert(extents.end(), now.strides, now.strides + now.ndim);
    }
    bool operator==(const SeenList& o) const {
        return this == &o || (kinds == o.kinds && kind_of == o.kind_of && extents == o.extents);
    }
};

// A list of tensors as it was read.
struct Read {
    std::shared_ptr<Held> held;
    std::shared_ptr<const SeenList> seen;
    Pointers pointers;
};

// While one of these is entered, on this thread, each list of tensors is read once: the same tensors again are as they were.
// Who enters it knows that nobody else's code runs meanwhile; so one inside another is a part of it. Without `once` every list is
// read anew in it and after it.
class Reading {
public:
    explicit Reading(bool once) : once_(once) {}
    Reading(const Reading&) = delete;
    ~Reading() {
        if (current() == this) current() = outer_;  // it was never left
    }
    // Tensors that are let go of may run code that reads lists: they are freed last.
    void enter() {
        std::vector<Read> freed;
        outer_ = current();
        if (outer_ != nullptr && !once_) freed.swap(outer_->reads_);
        current() = !once_ ? nullptr : outer_ != nullptr ? outer_ : this;
    }
    void exit() {
        std::vector<Read> freed;
        current() = outer_;
        freed.swap(reads_);
    }
    static Reading*& current() {
        thread_local Reading* reading = nullptr;
        return reading;
    }
    const Read* find(PyObject* const* items, size_t count) const {
        for (const auto& read : reads_) {
            const auto& held = read.held->tensors;
            if (held.size() == count && std::equal(held.begin(), held.end(), items)) return &read;
        }
        return nullptr;
    }
    void keep(Read&& read) { reads_.push_back(std::move(read)); }

private:
    bool once_;
    Reading* outer_ = nullptr;
    std::vector<Read> reads_;
};

// What was seen of the lists of a call. Between calls it proves, for all lists at once, that the same entries are None and
// that dtype, device, shape and strides of the others are still the same, and reads their addresses. From Python that takes
// longer than the arithmetic on small tensors.
class SeenLists {
public:
    // An entry that is None in one of the first `deciding` lists is left out in all; elsewhere there must be tensors.
    // `is_neg`: tells of a tensor whether its values are negated when they are read, which DLPack does not report. Only where
    // there is no second element can such a tensor, the real view of a conjugated one, have the strides of a dense one.
    // Throws TypeError where there is something else than a `tensor_type`, and whatever the exchange raises.
    SeenLists(const py::capsule& exchange, const py::type& tensor_type, py::object is_neg, const py::tuple& lists,
              size_t deciding)
        : api_(exchange_from(exchange)), is_neg_(std::move(is_neg)), deciding_(deciding) {
        if (!can_read(lists)) throw py::type_error("lists must be lists or tuples, all of one length");
        for (Py_ssize_t i = 0; i < count_; ++i) left_out_.push_back(uint8_t(leaves_out(lists, i)));
        used_ = size_t(std::count(left_out_.begin(), left_out_.end(), 0));
        for (size_t k = 0; k < lists.size(); ++k) {
            auto list = std::make_shared<SeenList>();
            for (Py_ssize_t i = 0; i < count_; ++i) {
                if (left_out_[size_t(i)] == 0) see(*list, py::reinterpret_borrow<py::object>(items(lists, k).at(i)), tensor_type);
            }
            seen_.push_back(std::move(list));
        }
    }

    // Reads the lists again: their addresses, or null where something is not as it was.
    std::unique_ptr<Addresses> find(const py::tuple& lists) {
        if (lists.size() != seen_.size() || !can_read(lists)) return nullptr;
        const bool whole = used_ == size_t(count_);  // then a None is found by its type
        for (Py_ssize_t i = 0; !whole && i < count_; ++i) {
            if (leaves_out(lists, i) != (left_out_[size_t(i)] != 0)) return nullptr;
        }
        auto found = std::make_unique<Addresses>();
        found->lists.resize(seen_.size());
        Reading* reading = whole ? Reading::current() : nullptr;
        for (size_t k = 0; k < seen_.size(); ++k) {
            if (items(lists, k).size() != count_) return nullptr;  // is_neg may have run anything
            const Read* earlier = reading == nullptr ? nullptr : reading->find(items(lists, k).data(), used_);
            if (earlier != nullptr) {
                if (!(*earlier->seen == *seen_[k])) return nullptr;
                found->lists[k] = earlier->pointers;
                found->held.push_back(earlier->held);
                continue;
            }
            const auto held = found->held.emplace_back(std::make_shared<Held>());
            if (!read(items(lists, k), *seen_[k], *held, found->lists[k])) return nullptr;
            if (reading != nullptr) reading->keep({held, seen_[k], found->lists[k]});
        }
        return found;
    }

    // The same for Python.
    py::object match(const py::tuple& lists) {
        auto found = find(lists);
        return found == nullptr ? py::none() : py::owning(std::move(found));
    }

    // Whether the one list that was given is as it was.
    bool again(const py::object& list) {
        return find(py::tuple_of(list)) != nullptr;
    }

private:
    static Items items(const py::tuple& lists, size_t k) { return Items(PyTuple_GET_ITEM(lists.ptr(), Py_ssize_t(k))); }

    bool can_read(const py::tuple& lists) {
        for (size_t k = 0; k < lists.size(); ++k) {
            if (!Items::serves(PyTuple_GET_ITEM(lists.ptr(), Py_ssize_t(k)))) return false;
            const Py_ssize_t size = items(lists, k).size();
            if (count_ < 0) count_ = size;
            if (size != count_) return false;
        }
        return true;
    }

    bool leaves_out(const py::tuple& lists, Py_ssize_t i) const {
        for (size_t k = 0; k < deciding_; ++k) {
            if (items(lists, k).at(i) == Py_None) return true;
        }
        return false;
    }

    void see(SeenList& list, const py::object& tensor, const py::type& tensor_type) {
        if (!PyObject_TypeCheck(tensor.ptr(), reinterpret_cast<PyTypeObject*>(tensor_type.ptr()))) {
            throw py::type_error("a list holds something that is not a tensor");
        }
        DLTensor now;
        if (api_->dltensor_from_py_object_no_sync(tensor.ptr(), &now) != 0) throw py::error_already_set();
        if (now.strides == nullptr && now.ndim != 0) throw py::value_error("the exchange reports no strides");
        int64_t numel = 1;
        for (int32_t d = 0; d < now.ndim; ++d) numel *= now.shape[d];
        list.add({Py_TYPE(tensor.ptr()), now.dtype, now.device, now.ndim, numel == 1}, now);
    }

    // Whether one list is as it was seen: holds its tensors, and appends their addresses.
    bool read(const Items& items, const SeenList& seen, Held& held, Pointers& pointers) {
        held.tensors.reserve(used_);
        pointers.reserve(used_);
        const uint32_t* kind_of = seen.kind_of.data();
        const int64_t* extent = seen.extents.data();
        Ahead<true> ahead;
        for (Py_ssize_t i = 0; i < count_; ++i) {
            if (left_out_[size_t(i)] != 0) continue;
            ahead(i, items);
            PyObject* tensor = items.at(i);
            const Kind& kind = seen.kinds[*kind_of++];
            if (tensor == nullptr || Py_TYPE(tensor) != kind.type) return false;
            Py_INCREF(tensor);
            held.tensors.push_back(tensor);
            DLTensor now;
            if (api_->dltensor_from_py_object_no_sync(tensor, &now) != 0) {
                PyErr_Clear();  // not a dense tensor any more: the full check will say what it is
                return false;
            }
            if (!kind.has(now) || (now.ndim != 0 && now.strides == nullptr)) return false;
            for (int32_t d = 0; d < now.ndim; ++d) {
                if (extent[d] != now.shape[d] || extent[now.ndim + d] != now.strides[d]) return false;
            }
            char* at = static_cast<char*>(now.data) + now.byte_offset;
            if (kind.is_single && !is_where_real_parts_are(at, kind) && is_negated(tensor)) return false;
            extent += 2 * now.ndim;
            pointers.push_back(at);
        }
        return true;
    }

    // A negated view is of the imaginary parts of complex numbers, which lie behind the real ones. These are where torch
    // allocates, so that most tensors need not be asked, which takes longer than all else here.
    static bool is_where_real_parts_are(const char* at, const Kind& kind) {
        return reinterpret_cast<uintptr_t>(at) % std::max<uintptr_t>(kind.dtype.bits / 4, 1) == 0;
    }

    bool is_negated(PyObject* tensor) const {
        const auto answer = py::reinterpret_steal<py::object>(PyObject_CallOneArg(is_neg_.ptr(), tensor));
        if (!answer) throw py::error_already_set();
        return answer.ptr() != Py_False;
    }

    const DLPackExchangeAPI* api_;
    py::object is_neg_;
    size_t deciding_, used_ = 0;
    Py_ssize_t count_ = -1;
    std::vector<uint8_t> left_out_;  // by entry
    std::vector<std::shared_ptr<const SeenList>> seen_;
};

// Addresses as SeenLists found them, or as lists of integers; for as long as this and `source` are there.
class PointerLists {
public:
    explicit PointerLists(const py::object& source) {
        if (py::isinstance<Addresses>(source)) {
            lists_ = &source.cast<const Addresses&>().lists;
            return;
        }
        for (py::handle list : source.cast<py::list>()) {
            own_.emplace_back();
            for (py::handle address : list.cast<py::list>()) {
                own_.back().push_back(reinterpret_cast<void*>(address.cast<uintptr_t>()));
            }
        }
        lists_ = &own_;
    }
    PointerLists(const PointerLists&) = delete;
    size_t size() const { return lists_->size(); }
    const Pointers& operator[](size_t list) const {
        if (list >= lists_->size()) throw std::invalid_argument("there are fewer lists of addresses than the operation has");
        return (*lists_)[list];
    }
    const std::vector<Pointers>& all() const { return *lists_; }

private:
    std::vector<Pointers> own_;
    const std::vector<Pointers>* lists_;
};

// One flag for each tensor, by place: from one bool, or from a list of n of them, by row.
std::vector<uint8_t> flags_of(const py::object& source, const std::vector<int64_t>& rows, int64_t n) {
    if (py::isinstance<py::bool_>(source)) return std::vector<uint8_t>(rows.size(), source.cast<bool>());
    std::vector<uint8_t> flags;
    flags.reserve(rows.size());
    const auto all = py::reinterpret_steal<py::object>(PySequence_Fast(source.ptr(), "flags must be a bool or a sequence"));
    if (!all) throw py::error_already_set();
    for (int64_t row : rows) {
        if (row >= n || PySequence_Fast_GET_SIZE(all.ptr()) != n) throw std::invalid_argument("there must be one flag for each entry");
        const int truth = PyObject_IsTrue(PySequence_Fast_GET_ITEM(all.ptr(), row));
        if (truth < 0) throw py::error_already_set();
        flags.push_back(uint8_t(truth));
    }
    return flags;
}

template <class T>
T* address(uintptr_t at) {
    return reinterpret_cast<T*>(at);
}

// Writes the addresses of `count` lists from the `first` on, of the tensors at `places` or of all, to memory, `stride` bytes
// apart. Whether one of them is not what was there.
bool put_addresses(const py::object& source, size_t first, size_t count, const std::optional<std::vector<size_t>>& places,
                   uintptr_t to, size_t stride) {
    const PointerLists lists(source);
    char* at = address<char>(to);
    bool moved = false;
    const auto put = [&](void* pointer) {
        moved |= std::memcmp(at, &pointer, sizeof(pointer)) != 0;
        std::memcpy(at, &pointer, sizeof(pointer));
        at += stride;
    };
    for (size_t k = first; k < first + count; ++k) {
        if (!places) {
            for (void* pointer : lists[k]) put(pointer);
            continue;
        }
        for (size_t place : *places) put(lists[k].at(place));
    }
    return moved;
}

void bind_seen_lists(py::module_& module) {
    py::class_<Addresses>(module, "Addresses");
    py::class_<Reading>(module, "Reading")
        .def(py::init<bool>())
        .def("__enter__", &Reading::enter)
        .def("__exit__", [](Reading& reading, py::handle, py::handle, py::handle) { reading.exit(); });
    py::class_<SeenLists>(module, "SeenLists")
        .def(py::init<const py::capsule&, const py::type&, py::object, const py::tuple&, size_t>())
        .def("match", &SeenLists::match)
        .def("again", &SeenLists::again);
    module.def("put_addresses", &put_addresses);
}

}  // namespace
}  // namespace fp16opt
