// What each 16-bit word of a tensor adds to sums over the tensor, in any order: to its digest, modulo 2^64, and to its guard,
// modulo 2^32. Passes that mark words keep the guard of what they marked, so it is made for vectors, and has fewer bits.
#pragma once

#include "../core/macros.h"

FP16OPT_BEGIN

// `index` is the word's in the whole tensor, modulo 2^32. Another word at the same index has another term.
FP16OPT_HD uint64_t digest_term(uint32_t word, uint32_t index) {
    uint32_t h = index * 0x9E3779B1u;
    h ^= h >> 16;
    h = (h ^ word) * 0x85EBCA6Bu;
    h ^= h >> 15;
    h *= 0xC2B2AE35u;
    h ^= h >> 16;
    return uint64_t(h) * h;
}

constexpr int kGuarded = 64;  // words that have a factor in common

// Odd factors: of a word's place among kGuarded, below 2^15, and of all these.
FP16OPT_HD constexpr int32_t guard_key(int k) { return (2 * k + 1) * 0x6487 & 0x7fff; }
FP16OPT_HD uint32_t guard_factor(uint32_t block) {
    uint32_t h = block * 0x9E3779B1u;
    h ^= h >> 15;
    h *= 0x85EBCA6Bu;
    h ^= h >> 13;
    return h | 1u;
}
FP16OPT_HD uint32_t guard_product(uint16_t word, int k) { return uint32_t(int32_t(int16_t(word)) * guard_key(k)); }
FP16OPT_HD uint32_t guard_term(uint16_t word, int64_t place) {
    return guard_product(word, int(place % kGuarded)) * guard_factor(uint32_t(place / kGuarded));
}

FP16OPT_END
