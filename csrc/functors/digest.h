// What each 16-bit word of a tensor adds to the tensor's digest, modulo 2^64: so pieces add up, in any order.
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

FP16OPT_END
