// Asks the cache for tensors before a loop comes to them. A tensor of Python's leads to one of torch's, and that to its memory
// and its version counter: three lines far apart, each found only once the one before has come. Of a thousand small tensors,
// waited for one after the other, that takes longer than a step's arithmetic.
#pragma once

#include <cstring>

#include "binding.h"
#include "core/macros.h"

namespace fp16opt {
namespace {

// Torch's tensor, of a tensor of Python's: what stands behind its header, as `learn_tensors` saw.
inline const char* inner_of(const PyObject* tensor) {
    const char* found = nullptr;
    std::memcpy(&found, tensor + 1, sizeof(found));
    return found;
}

// The class of whose objects that is known; null where it is not.
inline PyTypeObject*& known_tensors() {
    static PyTypeObject* type = nullptr;
    return type;
}

// `address`: of torch's tensor behind `tensor`, as torch tells it.
inline void learn_tensors(const py::object& tensor, uintptr_t address) {
    const bool fits = Py_TYPE(tensor.ptr())->tp_basicsize >= Py_ssize_t(sizeof(PyObject) + sizeof(void*)) &&
                      reinterpret_cast<uintptr_t>(inner_of(tensor.ptr())) == address;
    known_tensors() = fits ? reinterpret_cast<PyTypeObject*>(py::type::of(tensor).release().ptr()) : nullptr;  // kept for ever
}

// What a loop over tensors reads ahead of itself. Torch's own tensor, which is longer than a line, is guessed about: no result
// depends on what is found in it, and a wrong guess costs time.
template <bool reads_memory>  // else what autograd knows and version counters
class Ahead {
public:
    // Of a loop over `items` that is at `i`. `items.at` gives null behind the end.
    template <class Items>
    void operator()(Py_ssize_t i, const Items& items) {
#if defined(__GNUC__)
        if (known_tensors() == nullptr) return;
        if (i == 0) {
            for (Py_ssize_t k = 0; k < kOuter; ++k) outer(items.at(k));
            for (Py_ssize_t k = 0; k < kInner; ++k) middle(items.at(k));
            for (Py_ssize_t k = 0; k < kBehind; ++k) behind(items.at(k));
        }
        outer(items.at(i + kOuter));
        middle(items.at(i + kInner));
        behind(items.at(i + kBehind));
#else
        (void)i, (void)items;
#endif
    }

private:
    static constexpr Py_ssize_t kOuter = 24, kInner = 16, kBehind = 8;  // so many tensors ahead
    static constexpr size_t kLine = 64;

    bool is_tensor(PyObject* object) {
        if (object == nullptr) return false;
        if (Py_TYPE(object) != seen_) {
            seen_ = Py_TYPE(object);
            known_ = PyType_IsSubtype(seen_, known_tensors()) != 0;
        }
        return known_;
    }
#if defined(__GNUC__)
    FP16OPT_INLINE static void outer(PyObject* object) { __builtin_prefetch(object); }
    void middle(PyObject* object) {
        if (!is_tensor(object)) return;
        const char* from = inner_of(object);
        for (size_t line = 0; line < (reads_memory ? 4 : 2); ++line) __builtin_prefetch(from + kLine * line);
    }
    // Storage, what autograd knows and the version counter are among the first words of torch's tensor, behind its virtual
    // table and its reference count. The first two are as long as two and three lines.
    void behind(PyObject* object) {
        const char* from = is_tensor(object) ? inner_of(object) : nullptr;
        if (from == nullptr) return;
        const char* words[kLine / sizeof(void*)];
        std::memcpy(words, from, kLine);
        constexpr size_t kStorage = 2, kAutograd = 3, kVersions = 6;
        for (size_t word = reads_memory ? kStorage : kAutograd; word <= (reads_memory ? kAutograd : kVersions); ++word) {
            if (words[word] == nullptr) continue;
            const size_t lines = reads_memory ? 2 : word == kAutograd ? 3 : 1;
            for (size_t line = 0; line < lines; ++line) __builtin_prefetch(words[word] + kLine * line);
        }
    }
#endif

    PyTypeObject* seen_ = nullptr;
    bool known_ = false;
};

}  // namespace
}  // namespace fp16opt
