// Eight consecutive elements in registers, as they are stored: what one GPU thread loads and stores at a time. Sixteen
// bytes an access where the address allows it. Elsewhere, and at the end of a chunk, loads read the sixteen-byte blocks
// that the elements lie in, and shift; in stores the threads of a warp give each other what is lacking of a block.
#pragma once

#include "../core/dtype.h"
#include "../functors/cast.h"
#include "../functors/l2norm.h"
#include "../functors/sample.h"
#include "turns.h"

#if defined(__CUDACC__)
#define FP16OPT_UNROLL _Pragma("unroll")
#define FP16OPT_ROLLED _Pragma("unroll 1")  // seldom more than one turn: longer code would only be compiled, and proved
#else
#define FP16OPT_UNROLL
#define FP16OPT_ROLLED
#endif

FP16OPT_BEGIN

static_assert(kGroup == 8, "a thread works on one group of a sum of squares at a time");

FP16OPT_HD bool is_aligned(const void* at) { return reinterpret_cast<uintptr_t>(at) % 16 == 0; }

struct alignas(16) Bytes16 {
    uint32_t word[4];
};

FP16OPT_HD Bytes16 load16(const void* from) {
#if defined(__CUDA_ARCH__)
    const uint4 v = *static_cast<const uint4*>(from);
    return Bytes16{{v.x, v.y, v.z, v.w}};
#else
    Bytes16 bytes;
    memcpy(&bytes, from, sizeof(bytes));
    return bytes;
#endif
}

// kWords words, 2 or 4, from an address that is a multiple of so many.
template <int kWords>
FP16OPT_HD void load_words(const void* from, uint32_t* to) {
    if constexpr (kWords == 4) {
        const Bytes16 b = load16(from);
        FP16OPT_UNROLL
        for (int k = 0; k < 4; ++k) to[k] = b.word[k];
    } else {
#if defined(__CUDA_ARCH__)
        const uint2 v = *static_cast<const uint2*>(from);
        to[0] = v.x;
        to[1] = v.y;
#else
        memcpy(to, from, 8);
#endif
    }
}

// kWhole: by an instruction that the compiler can't take apart. It does so with four of 32 bits in steps that store several
// lists of float32, and the memory then gets four times as many requests. Where it doesn't, the instruction costs registers.
template <bool kWhole = false>
FP16OPT_HD void store16(void* to, const Bytes16& b) {
#if defined(__CUDA_ARCH__)
    const uint4 v = make_uint4(b.word[0], b.word[1], b.word[2], b.word[3]);
    if constexpr (kWhole) {
        __stwb(static_cast<uint4*>(to), v);
    } else {
        *static_cast<uint4*>(to) = v;
    }
#else
    memcpy(to, &b, sizeof(b));
#endif
}

// The first `bytes` bytes from `from` on, and anything behind them, in kWords words. Blocks of sixteen bytes that hold one of
// these bytes are read whole: memory is given out in such blocks, so what else lies there may be read. No register is chosen
// by a number that the compiler does not know, or the words would lie in memory.
template <int kWords, bool kWhole>  // whether addresses are multiples of a word
FP16OPT_HD void load_shifted(const void* from, int bytes, uint32_t* to) {
    constexpr int kBlocks = (kWords + 3) / 4 + 1;
    const int offset = int(reinterpret_cast<uintptr_t>(from) % 16);
    uint32_t words[4 * kBlocks];
    FP16OPT_UNROLL
    for (int k = 0; k < kBlocks; ++k) {
        Bytes16 block{{0, 0, 0, 0}};
        if (16 * k < offset + bytes) block = load16(static_cast<const char*>(from) - offset + 16 * k);
        FP16OPT_UNROLL
        for (int i = 0; i < 4; ++i) words[4 * k + i] = block.word[i];
    }
    FP16OPT_UNROLL
    for (int i = 0; i < kWords + 2; ++i) words[i] = (offset & 8) != 0 ? words[i + 2] : words[i];
    FP16OPT_UNROLL
    for (int i = 0; i < kWords + 1; ++i) words[i] = (offset & 4) != 0 ? words[i + 1] : words[i];
    FP16OPT_UNROLL
    for (int i = 0; i < kWords; ++i) {
        to[i] = kWhole ? words[i] : uint32_t((uint64_t(words[i + 1]) << 32 | words[i]) >> (offset % 4 * 8));
    }
}

// T is Half or BFloat16.
template <class T>
struct Eight {
    Bytes16 bytes;

    FP16OPT_HD void load_any(const T* from, int valid) {
        load_shifted<4, false>(from, 2 * valid, bytes.word);
        FP16OPT_UNROLL
        for (int k = 0; k < 4; ++k) {
            bytes.word[k] = 2 * k + 1 < valid ? bytes.word[k] : 2 * k < valid ? bytes.word[k] & 0xFFFFu : 0u;
        }
    }

    FP16OPT_HD void load(const T* from) { bytes = load16(from); }
    template <bool kWhole = false>
    FP16OPT_HD void store(T* to) const {
        store16<kWhole>(to, bytes);
    }
    FP16OPT_HD uint32_t word_at(int k) const { return bytes.word[k]; }
    FP16OPT_HD void set_word(int k, uint32_t value) { bytes.word[k] = value; }
    FP16OPT_HD T get(int i) const { return T{uint16_t(bytes.word[i / 2] >> (i % 2 * 16))}; }
    FP16OPT_HD void clear() { bytes = Bytes16{{0, 0, 0, 0}}; }
    FP16OPT_HD void set(int i, T value) {  // of a place that is clear
        bytes.word[i / 2] |= uint32_t(value.bits) << (i % 2 * 16);
    }
    // A digest's terms of the first `valid` elements; the others must be clear.
    FP16OPT_HD uint64_t sample_terms(int64_t first_word, int valid) const {
        const uint64_t low = bytes.word[0] | uint64_t(bytes.word[1]) << 32;
        const uint64_t high = bytes.word[2] | uint64_t(bytes.word[3]) << 32;
        const uint64_t sum = sample_term(low, first_word);
        return valid <= 4 ? sum : sum + sample_term(high, first_word + 1);
    }
};

template <>
struct Eight<float> {
    float v[8];

    FP16OPT_HD void load_any(const float* from, int valid) {
        uint32_t words[kGroup];
        load_shifted<kGroup, true>(from, 4 * valid, words);
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) v[k] = k < valid ? bit_cast<float>(words[k]) : 0.0f;
    }
    FP16OPT_HD void load(const float* from) {
        FP16OPT_UNROLL
        for (int k = 0; k < 2; ++k) {
            const Bytes16 b = load16(from + 4 * k);
            FP16OPT_UNROLL
            for (int i = 0; i < 4; ++i) v[4 * k + i] = bit_cast<float>(b.word[i]);
        }
    }
    template <bool kWhole = false>
    FP16OPT_HD void store(float* to) const {
        FP16OPT_UNROLL
        for (int k = 0; k < 2; ++k) {
            Bytes16 b;
            FP16OPT_UNROLL
            for (int i = 0; i < 4; ++i) b.word[i] = bit_cast<uint32_t>(v[4 * k + i]);
            store16<kWhole>(to + 4 * k, b);
        }
    }
    FP16OPT_HD uint32_t word_at(int k) const { return bit_cast<uint32_t>(v[k]); }
    FP16OPT_HD void set_word(int k, uint32_t value) { v[k] = bit_cast<float>(value); }
    FP16OPT_HD float get(int i) const { return v[i]; }
    FP16OPT_HD void clear() {
        FP16OPT_UNROLL
        for (int i = 0; i < 8; ++i) v[i] = 0.0f;
    }
    FP16OPT_HD void set(int i, float value) { v[i] = value; }
};

// Of one byte each: codes, or remainders of masters in 24 bits.
template <>
struct Eight<uint8_t> {
    uint32_t word[2];

    FP16OPT_HD void load_any(const uint8_t* from, int valid) {
        load_shifted<2, false>(from, valid, word);
        FP16OPT_UNROLL
        for (int k = 0; k < 2; ++k) {
            const int left = valid - 4 * k;
            word[k] = left >= 4 ? word[k] : left <= 0 ? 0u : word[k] & (0xFFFFFFFFu >> (32 - 8 * left));
        }
    }
    FP16OPT_HD void load(const uint8_t* from) { load_words<2>(from, word); }
    template <bool kWhole = false>
    FP16OPT_HD void store(uint8_t* to) const {
#if defined(__CUDA_ARCH__)
        *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
#else
        memcpy(to, word, sizeof(word));
#endif
    }
    FP16OPT_HD uint32_t word_at(int k) const { return word[k]; }
    FP16OPT_HD void set_word(int k, uint32_t value) { word[k] = value; }
    FP16OPT_HD uint8_t get(int i) const { return uint8_t(word[i / 4] >> (i % 4 * 8)); }
    FP16OPT_HD void clear() { word[0] = word[1] = 0; }
    FP16OPT_HD void set(int i, uint8_t value) { word[i / 4] |= uint32_t(value) << (i % 4 * 8); }
};

// The elements from `from` on: the first `valid`, and zeros behind them. `valid` may be more than eight.
template <class T>
FP16OPT_HD void load(Eight<T>& to, const T* from, bool aligned, int valid) {
    if (aligned && valid >= kGroup) return to.load(from);
    to.load_any(from, valid < kGroup ? valid : kGroup);
}

// Four elements from `from` on and four that lie `apart` elements behind them. Both are aligned. A warp's stores of four
// elements of 32 bits then fill the memory's blocks of 32 bytes; eight in a row come as two stores, each of half of every block,
// which an H100 writes at 0.83 of the speed of its copies, and these at 0.95.
template <class T>
FP16OPT_HD void load_apart(Eight<T>& to, const T* from, int apart) {
    constexpr int kWords = int(sizeof(T));  // of four elements
    FP16OPT_UNROLL
    for (int part = 0; part < 2; ++part) {
        uint32_t words[4];
        load_words<kWords>(from + part * apart, words);
        FP16OPT_UNROLL
        for (int k = 0; k < kWords; ++k) to.set_word(part * kWords + k, words[k]);
    }
}
FP16OPT_HD void store_apart(const Eight<float>& from, float* to, int apart) {
    FP16OPT_UNROLL
    for (int part = 0; part < 2; ++part) {
        Bytes16 b;
        FP16OPT_UNROLL
        for (int k = 0; k < 4; ++k) b.word[k] = from.word_at(4 * part + k);
        store16(to + part * apart, b);
    }
}

// The elements from `first` to before `end`, one by one.
template <class T>
FP16OPT_HD void store_singly(const Eight<T>& from, T* to, int first, int end) {
    FP16OPT_UNROLL
    for (int i = 0; i < kGroup; ++i) {
        if (first <= i && i < end) to[i] = from.get(i);
    }
#if !defined(__CUDACC__)
    fp16opt_single_stores += uint64_t((end < kGroup ? end : kGroup) - first);
#endif
}

// The first `valid` elements, by a thread that may be alone in its warp to store any.
template <bool kWhole = false, class T>
FP16OPT_HD void store_alone(const Eight<T>& from, T* to, bool aligned, int valid) {
    if (aligned && valid >= kGroup) return from.template store<kWhole>(to);
    store_singly(from, to, 0, valid);
}

// How many bytes a store has at most: sixteen, or those of eight elements.
template <class T>
constexpr FP16OPT_HD int block_bytes() {
    return sizeof(T) == 1 ? 8 : 16;
}
// How many words of the thread before, its last ones, a block may begin with.
template <class T>
constexpr FP16OPT_HD int words_before() {
    return (block_bytes<T>() - int(sizeof(T)) + 3) / 4;
}

// Thread `lane` of a warp stores the block, or two, that its elements begin in, from the block's beginning on, if they and those
// of the thread before fill it; the first and the last thread store singly what is in no such block. `before`: the last
// words of the thread before.
template <bool kWhole, class T>
FP16OPT_HD void store_blocks(const Eight<T>& from, const uint32_t* before, T* to, int left, int lane) {
    constexpr int kWords = 2 * int(sizeof(T)), kBefore = words_before<T>();
    const int offset = int(reinterpret_cast<uintptr_t>(to) % block_bytes<T>());
    const int held = kGroup - offset / int(sizeof(T));  // of its own elements in the block
    const bool whole = (offset == 0 || lane > 0) && left >= held, next_whole = lane < kWarp - 1 && left - kGroup >= held;
    const int first = whole ? held : 0, end = next_whole ? held : left;
    if (first < end) store_singly(from, to, first, end);
    if (!whole) return;
    uint32_t words[kBefore + kWords];
    FP16OPT_UNROLL
    for (int k = 0; k < kBefore; ++k) words[k] = before[k];
    FP16OPT_UNROLL
    for (int k = 0; k < kWords; ++k) words[kBefore + k] = from.word_at(k);
    FP16OPT_UNROLL
    for (int k = kBefore + kWords - 1; k >= 2; --k) words[k] = (offset & 8) != 0 ? words[k - 2] : words[k];
    FP16OPT_UNROLL
    for (int k = kBefore + kWords - 1; k >= 1; --k) words[k] = (offset & 4) != 0 ? words[k - 1] : words[k];
    Eight<T> shifted;
    FP16OPT_UNROLL
    for (int k = 0; k < kWords; ++k) {
        const uint32_t low = words[kBefore + k - 1], high = words[kBefore + k];
        shifted.set_word(k, sizeof(T) == 4 ? high : uint32_t((uint64_t(high) << 32 | low) >> (32 - offset % 4 * 8)));
    }
    shifted.template store<kWhole>(reinterpret_cast<T*>(reinterpret_cast<char*>(to) - offset));
}

// The first `left` elements, by all threads of a warp that have any: they call this together, for groups one behind the
// other. `left` is what there is from `to` on, up to 256, so that a thread knows which of those behind it have some.
template <bool kWhole = false, class T>
FP16OPT_HD void store(const Eight<T>& from, T* to, bool aligned, int left) {
    if (aligned) return store_alone<kWhole>(from, to, true, left);
    constexpr int kWords = 2 * int(sizeof(T)), kBefore = words_before<T>();
#if defined(__CUDA_ARCH__)
    const int lane = int(threadIdx.x) % kWarp;
    const uint32_t together = threads_with_some(lane, left);
    uint32_t before[kBefore];
    FP16OPT_UNROLL
    for (int k = 0; k < kBefore; ++k) {
        before[k] = __shfl_up_sync(together, from.word_at(kWords - kBefore + k), 1);
    }
    store_blocks<kWhole>(from, before, to, left, lane);
#else
    Given given{{}, kWords, reinterpret_cast<char*>(to), left, nullptr};
    for (int k = 0; k < kWords; ++k) given.words[k] = from.word_at(k);
    given.store = [](const Given& own, const uint32_t* end_of_before, int lane) {
        Eight<T> mine;
        uint32_t before[kBefore] = {};
        for (int k = 0; k < kWords; ++k) mine.set_word(k, own.words[k]);
        for (int k = 0; end_of_before != nullptr && k < kBefore; ++k) before[k] = end_of_before[k - kBefore];
        store_blocks<kWhole>(mine, before, reinterpret_cast<T*>(own.to), own.left, lane);
    };
    turns.give(given);
#endif
}

// Rounds eight float32 to the type of the memory.
template <class T>
FP16OPT_HD Eight<T> narrow_eight(const Eight<float>& from) {
    Eight<T> result;
    result.clear();
    FP16OPT_UNROLL
    for (int i = 0; i < kGroup; ++i) result.set(i, narrow<T>(from.v[i]));
    return result;
}

FP16OPT_END
