// The content hash: one term for each 64-bit word of a tensor, added modulo 2^64 in any order.
#pragma once

#include "../core/macros.h"

FP16OPT_BEGIN

constexpr uint64_t kHashKey = 0x9E3779B97F4A7C15ull;

// `index` counts the words of the tensor from 0.
FP16OPT_HD uint64_t hash_key(int64_t index) { return (uint64_t(index) + 1) * kHashKey; }

FP16OPT_HD uint64_t hash_word(uint64_t word, uint64_t key) {
    const uint64_t x = word ^ key;
    return (x & 0xffffffffull) * (x >> 32) + word;
}

// In the sample of a chunk of `numel` elements are the first 64 of every so many, or all where there are few.
FP16OPT_HD int64_t sample_stride(int64_t numel) { return numel <= 8192 ? 64 : 8192; }

FP16OPT_END
