// The digest of a 16-bit tensor's sample, by which a write to it is noticed: one term for each word that is looked at, added
// modulo 2^64 in any order. Of a short tensor all elements are looked at, four of them in a word (the last one padded with
// zeros); of a longer one a lattice of single elements, each a word.
#pragma once

#include "../core/macros.h"

FP16OPT_BEGIN

constexpr int64_t kSampledWhole = 16384;  // elements; longer tensors have a lattice
constexpr int64_t kLeastStride = 1009;

// From one element of the lattice to the next, in memory order. It has no divisor in common with the number of elements, and
// so none with the length of any dimension: columns, filters and other regular parts of a tensor are all hit alike.
FP16OPT_HD int64_t sample_stride(int64_t numel) {
    for (int64_t stride = kLeastStride;; ++stride) {
        int64_t a = stride, b = numel % stride;
        while (b != 0) {
            const int64_t rest = a % b;
            a = b;
            b = rest;
        }
        if (a == 1) return stride;
    }
}

// `index` counts the words of a short tensor, or the elements of a longer one, from 0.
FP16OPT_HD uint64_t sample_term(uint64_t word, int64_t index) {
    const uint64_t x = word ^ (uint64_t(index) + 1) * 0x9E3779B97F4A7C15ull;
    return (x & 0xffffffffull) * (x >> 32) + word;
}

FP16OPT_END
