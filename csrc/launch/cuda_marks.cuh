// Marks of weights that get other bits, made where they are written. A kernel that marks is compiled with FP16OPT_MARKS from the
// source that one without it is compiled from, which then has no instruction and no field for it.
#pragma once

#include "../functors/digest.h"
#include "cuda.cuh"

FP16OPT_BEGIN

#if defined(FP16OPT_MARKS)

constexpr bool kMarks = true;

// Sets bits that other threads may set too; returns those that were there.
FP16OPT_HD uint32_t set_bits(uint32_t* at, uint32_t bits) {
#if defined(__CUDA_ARCH__)
    return atomicOr(at, bits);
#else
    const uint32_t before = *at;
    *at = before | bits;
    return before;
#endif
}

// Of an operation that writes weights: its first fields, and what it finds. A tensor's memory is as in api_changes.h.
struct Marking {
    uint64_t* bits;
    const int64_t* offsets;  // by row
    static constexpr int finds = kFlags | kDigest;  // the digest is the guard of what is newly marked

    // Once a tensor, behind all its chunks.
    FP16OPT_HD void add_guard(const Entry& entry, const Found& found) const {
        uint64_t* const guard = in_global_memory(bits) + offsets[entry.row];
        *guard = uint32_t(*guard + found.digest);
    }
};

// Where the weights of a chunk are marked.
class ChunkMarks {
public:
    FP16OPT_HD ChunkMarks(const Marking& marking, const Lists& lists, const Chunk& chunk)
        : bits_(reinterpret_cast<uint32_t*>(in_global_memory(marking.bits) + marking.offsets[lists.table[chunk.tensor].row] + 1)),
          start_(chunk.start) {}

    // Marks those of the chunk's weights from the i-th on that are not `after`, which is then written at `models`.
    template <class T>
    FP16OPT_HD void note(int i, const T* models, bool aligned, const Eight<T>& after, int left, Found& found) const {
        Eight<T> before;
        load(before, models + i, aligned, left);
        uint32_t differ = 0;
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) {
            if (k < left && before.get(k).bits != after.get(k).bits) differ |= 1u << k;
        }
        if (differ == 0) return;
        const int64_t place = start_ + i;
        uint32_t* const at = in_global_memory(bits_) + place / 32;
        const int shift = int(place % 32), above = 32 - shift;
        uint32_t marked = set_bits(at, differ << shift) >> shift;
        if (above < kGroup && differ >> above != 0) marked |= set_bits(at + 1, differ >> above) << above;
        uint32_t guard = 0;
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) {
            if (((differ & ~marked) >> k & 1u) != 0) guard += guard_term(before.get(k).bits, place + k);
        }
        found.digest += guard;
    }

private:
    uint32_t* bits_;
    int64_t start_;
};

#else

constexpr bool kMarks = false;

struct Marking {
    static constexpr int finds = kFlags;
    FP16OPT_HD void add_guard(const Entry&, const Found&) const {}
};

class ChunkMarks {
public:
    FP16OPT_HD ChunkMarks(const Marking&, const Lists&, const Chunk&) {}
    template <class T>
    FP16OPT_HD void note(int, const T*, bool, const Eight<T>&, int, Found&) const {}
};

#endif

FP16OPT_END
