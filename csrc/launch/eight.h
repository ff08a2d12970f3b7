// Eight consecutive elements in registers, as they are stored: what one GPU thread loads and stores at a time. Sixteen
// bytes an access where the address allows it. Elsewhere, and at the end of a chunk, loads read the sixteen-byte blocks
// that the elements lie in, and shift; stores go element by element.
#pragma once

#include "../core/dtype.h"
#include "../functors/cast.h"
#include "../functors/l2norm.h"
#include "../functors/sample.h"

#if defined(__CUDACC__)
#define FP16OPT_UNROLL _Pragma("unroll")
#else
#define FP16OPT_UNROLL
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

FP16OPT_HD void store16(void* to, const Bytes16& b) {
#if defined(__CUDA_ARCH__)
    *static_cast<uint4*>(to) = make_uint4(b.word[0], b.word[1], b.word[2], b.word[3]);
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
    FP16OPT_HD void store(T* to) const { store16(to, bytes); }
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
    FP16OPT_HD void store(float* to) const {
        FP16OPT_UNROLL
        for (int k = 0; k < 2; ++k) {
            Bytes16 b;
            FP16OPT_UNROLL
            for (int i = 0; i < 4; ++i) b.word[i] = bit_cast<uint32_t>(v[4 * k + i]);
            store16(to + 4 * k, b);
        }
    }
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
    FP16OPT_HD void load(const uint8_t* from) {
#if defined(__CUDA_ARCH__)
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        word[0] = v.x;
        word[1] = v.y;
#else
        memcpy(word, from, sizeof(word));
#endif
    }
    FP16OPT_HD void store(uint8_t* to) const {
#if defined(__CUDA_ARCH__)
        *reinterpret_cast<uint2*>(to) = make_uint2(word[0], word[1]);
#else
        memcpy(to, word, sizeof(word));
#endif
    }
    FP16OPT_HD uint8_t get(int i) const { return uint8_t(word[i / 4] >> (i % 4 * 8)); }
    FP16OPT_HD void clear() { word[0] = word[1] = 0; }
    FP16OPT_HD void set(int i, uint8_t value) { word[i / 4] |= uint32_t(value) << (i % 4 * 8); }
};

// The elements from `from` on: the first `valid`, and zeros behind them.
template <class T>
FP16OPT_HD void load(Eight<T>& to, const T* from, bool aligned, int valid) {
    if (aligned && valid == kGroup) return to.load(from);
    to.load_any(from, valid);
}

template <class T>
FP16OPT_HD void store(const Eight<T>& from, T* to, bool aligned, int valid) {
    if (aligned && valid == kGroup) return from.store(to);
    FP16OPT_UNROLL
    for (int i = 0; i < kGroup; ++i) {
        if (i < valid) to[i] = from.get(i);
    }
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
