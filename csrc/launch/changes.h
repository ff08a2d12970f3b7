// The CPU loops that mark which 16-bit words got other bits, and that digest words: 64 at a time.
#pragma once

#include "../functors/digest.h"
#include "simd.h"

FP16OPT_BEGIN

// A bit for each of 64 words: whether they differ.
#if defined(FP16OPT_AVX512)
FP16OPT_HD uint64_t differing(const uint16_t* a, const uint16_t* b) {
    const uint64_t low = _mm512_cmpneq_epu16_mask(_mm512_loadu_si512(a), _mm512_loadu_si512(b));
    const uint64_t high = _mm512_cmpneq_epu16_mask(_mm512_loadu_si512(a + 32), _mm512_loadu_si512(b + 32));
    return low | high << 32;
}
#elif defined(FP16OPT_AVX2)
FP16OPT_HD __m256i equal_shorts(const uint16_t* a, const uint16_t* b) {
    return _mm256_cmpeq_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)),
                              _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
}
FP16OPT_HD uint32_t differing_half(const uint16_t* a, const uint16_t* b) {
    const __m256i bytes = _mm256_packs_epi16(equal_shorts(a, b), equal_shorts(a + 16, b + 16));
    return ~uint32_t(_mm256_movemask_epi8(_mm256_permute4x64_epi64(bytes, 0xd8)));
}
FP16OPT_HD uint64_t differing(const uint16_t* a, const uint16_t* b) {
    return differing_half(a, b) | uint64_t(differing_half(a + 32, b + 32)) << 32;
}
#else
FP16OPT_HD uint64_t differing(const uint16_t* a, const uint16_t* b) {
    uint64_t found = 0;
    for (int i = 0; i < 64; i += 4) {
        uint64_t x, y;
        memcpy(&x, a + i, sizeof(x));
        memcpy(&y, b + i, sizeof(y));
        if (x == y) continue;
        for (int k = 0; k < 4; ++k) found |= uint64_t(a[i + k] != b[i + k]) << (i + k);
    }
    return found;
}
#endif

// Sets bits of a tensor's from the one at `place` on, and returns which of these were not set. `shared`: other threads may
// set others in the same words.
FP16OPT_HD uint64_t set_bits(uint64_t* bits, int64_t place, uint64_t mask, bool shared) {
    uint64_t* const at = bits + place / 64;
    const int shift = int(place % 64);
    if (!shared) {  // then the place is a multiple of 64
        const uint64_t before = *at;
        *at = before | mask;
        return mask & ~before;
    }
    uint64_t fresh = mask & ~(__atomic_fetch_or(at, mask << shift, __ATOMIC_RELAXED) >> shift);
    const uint64_t behind = shift == 0 ? 0 : mask >> (64 - shift);
    if (behind != 0) fresh &= ~(__atomic_fetch_or(at + 1, behind, __ATOMIC_RELAXED) << (64 - shift));
    return fresh;
}

// Marks words that differ; returns the sum of the terms that those which were not marked had before. `place`: of the first
// in its tensor.
FP16OPT_HD uint64_t mark_words(const uint16_t* before, const uint16_t* after, int64_t n, int64_t place, uint64_t* bits,
                               bool shared) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; i += 64) {
        uint64_t mask;
        if (n - i >= 64) {
            mask = differing(before + i, after + i);
        } else {
            uint16_t padded[2][64] = {};
            memcpy(padded[0], before + i, size_t(n - i) * sizeof(uint16_t));
            memcpy(padded[1], after + i, size_t(n - i) * sizeof(uint16_t));
            mask = differing(padded[0], padded[1]);
        }
        if (mask == 0) continue;
        uint64_t fresh = set_bits(bits, place + i, mask, shared);
        for (; fresh != 0; fresh &= fresh - 1) {
            const int k = __builtin_ctzll(fresh);
            sum += digest_term(before[i + k], uint32_t(place + i + k));
        }
    }
    return sum;
}

FP16OPT_HD uint64_t digest_words(const uint16_t* words, int64_t n, uint32_t first) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += digest_term(words[i], first + uint32_t(i));
    return sum;
}

FP16OPT_END
