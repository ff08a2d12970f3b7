// The CPU loops that mark which 16-bit words got other bits, and that digest words: 64 at a time.
#pragma once

#include "../functors/digest.h"
#include "simd.h"

FP16OPT_BEGIN

// The factors of 64 words, in order.
struct GuardKeys {
    alignas(64) int16_t v[kGuarded];

    constexpr GuardKeys() : v() {
        for (int k = 0; k < kGuarded; ++k) v[k] = int16_t((2 * k + 1) * 0x6487 & 0x7fff);
    }
};
constexpr GuardKeys kGuardKeys;

#if defined(FP16OPT_AVX512) || defined(FP16OPT_AVX2)
// Modulo 2^32: every addition is an instruction, which wraps.
FP16OPT_HD uint32_t sum_of(__m256i products) {
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(products), _mm256_extracti128_si256(products, 1));
    const __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return uint32_t(_mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1))));
}
#endif

// A bit for each of 64 words: whether they differ. `sum`: of the first words that do, and are not in `marked`, times their keys.
#if defined(FP16OPT_AVX512)
// Not by _mm512_reduce_add_epi32: compilers end it with an addition of two int, which may not overflow.
FP16OPT_HD uint32_t sum_of(__m512i products) {
    return sum_of(_mm256_add_epi32(_mm512_castsi512_si256(products), _mm512_extracti64x4_epi64(products, 1)));
}
FP16OPT_HD uint64_t differing(const uint16_t* a, const uint16_t* b, uint64_t marked, uint32_t& sum) {
    // All loads stand before the comparisons: where a sanitizer calls a function at each load, gcc 12 keeps a mask over the
    // call in 32 bits of memory, and reads back 64.
    const __m512i low = _mm512_loadu_si512(a), high = _mm512_loadu_si512(a + 32);
    const __m512i low_after = _mm512_loadu_si512(b), high_after = _mm512_loadu_si512(b + 32);
    const uint64_t mask = _mm512_cmpneq_epu16_mask(low, low_after) | uint64_t(_mm512_cmpneq_epu16_mask(high, high_after)) << 32;
    const uint64_t fresh = mask & ~marked;
    const __m512i first = _mm512_maskz_mov_epi16(__mmask32(fresh), low), second = _mm512_maskz_mov_epi16(__mmask32(fresh >> 32), high);
    sum = sum_of(_mm512_add_epi32(_mm512_madd_epi16(first, _mm512_load_si512(kGuardKeys.v)),
                                  _mm512_madd_epi16(second, _mm512_load_si512(kGuardKeys.v + 32))));
    return mask;
}
#elif defined(FP16OPT_AVX2)
// All bits of a lane, for each bit that is set.
FP16OPT_HD __m256i spread_bits(uint32_t sixteen) {
    const __m256i each = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
    return _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(int16_t(sixteen)), each), each);
}
FP16OPT_HD uint64_t differing(const uint16_t* a, const uint16_t* b, uint64_t marked, uint32_t& sum) {
    __m256i equal[4], products = _mm256_setzero_si256();
    for (int k = 0; k < 4; ++k) {
        const __m256i before = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a + 16 * k));
        equal[k] = _mm256_cmpeq_epi16(before, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b + 16 * k)));
        __m256i drop = equal[k];
        if (FP16OPT_UNLIKELY(marked != 0)) drop = _mm256_or_si256(drop, spread_bits(uint32_t(marked >> (16 * k)) & 0xffffu));
        const __m256i keys = _mm256_load_si256(reinterpret_cast<const __m256i*>(kGuardKeys.v + 16 * k));
        products = _mm256_add_epi32(products, _mm256_madd_epi16(_mm256_andnot_si256(drop, before), keys));
    }
    sum = sum_of(products);
    const __m256i low = _mm256_permute4x64_epi64(_mm256_packs_epi16(equal[0], equal[1]), 0xd8);
    const __m256i high = _mm256_permute4x64_epi64(_mm256_packs_epi16(equal[2], equal[3]), 0xd8);
    return ~(uint32_t(_mm256_movemask_epi8(low)) | uint64_t(uint32_t(_mm256_movemask_epi8(high))) << 32);
}
#else
FP16OPT_HD uint64_t differing(const uint16_t* a, const uint16_t* b, uint64_t marked, uint32_t& sum) {
    uint64_t mask = 0;
    sum = 0;
    for (int i = 0; i < 64; i += 4) {
        uint64_t x, y;
        memcpy(&x, a + i, sizeof(x));
        memcpy(&y, b + i, sizeof(y));
        if (x == y) continue;
        for (int k = i; k < i + 4; ++k) {
            if (a[k] == b[k]) continue;
            mask |= uint64_t(1) << k;
            if ((marked >> k & 1) == 0) sum += uint32_t(int32_t(int16_t(a[k])) * kGuardKeys.v[k]);
        }
    }
    return mask;
}
#endif

// Sets bits of a tensor's from the one at `place` on, where other threads may set others in the same words; returns which of
// these were not set.
FP16OPT_HD uint64_t set_shared(uint64_t* bits, int64_t place, uint64_t mask) {
    uint64_t* const at = bits + place / 64;
    const int shift = int(place % 64);
    uint64_t fresh = mask & ~(__atomic_fetch_or(at, mask << shift, __ATOMIC_RELAXED) >> shift);
    const uint64_t behind = shift == 0 ? 0 : mask >> (64 - shift);
    if (behind != 0) fresh &= ~(__atomic_fetch_or(at + 1, behind, __ATOMIC_RELAXED) << (64 - shift));
    return fresh;
}

// Marks words that differ; returns the part of the guard that those which were not marked had before. `place`: of the first in
// its tensor, a multiple of 64 unless `shared`.
FP16OPT_HD uint32_t mark_words(const uint16_t* before, const uint16_t* after, int64_t n, int64_t place, uint64_t* bits,
                               bool shared) {
    uint32_t guard = 0;
    for (int64_t i = 0; i < n; i += 64) {
        const uint16_t *from = before + i, *to = after + i;
        uint16_t padded[2][64];
        if (FP16OPT_UNLIKELY(n - i < 64)) {
            memset(padded, 0, sizeof(padded));
            memcpy(padded[0], from, size_t(n - i) * sizeof(uint16_t));
            memcpy(padded[1], to, size_t(n - i) * sizeof(uint16_t));
            from = padded[0];
            to = padded[1];
        }
        uint32_t sum;
        if (FP16OPT_UNLIKELY(shared)) {
            uint64_t fresh = set_shared(bits, place + i, differing(from, to, 0, sum));
            for (; fresh != 0; fresh &= fresh - 1) {
                const int k = __builtin_ctzll(fresh);
                guard += guard_term(from[k], place + i + k);
            }
            continue;
        }
        uint64_t* const at = bits + (place + i) / 64;
        const uint64_t marked = *at;
        *at = marked | differing(from, to, marked, sum);
        guard += sum * guard_factor(uint32_t((place + i) / 64));
    }
    return guard;
}

// The guard of words from the one at `place` on, which is a multiple of 64.
FP16OPT_HD uint32_t guard_words(const uint16_t* words, int64_t n, int64_t place) {
    uint32_t guard = 0;
    for (int64_t i = 0; i < n; i += 64) {
        int32_t sum = 0;
        const int count = n - i < 64 ? int(n - i) : 64;
        if (count == 64) {
            uint32_t unsigned_sum = 0;
            for (int k = 0; k < 64; ++k) unsigned_sum += uint32_t(int32_t(int16_t(words[i + k])) * kGuardKeys.v[k]);
            sum = int32_t(unsigned_sum);
        } else {
            for (int k = 0; k < count; ++k) sum = int32_t(uint32_t(sum) + uint32_t(int32_t(int16_t(words[i + k])) * kGuardKeys.v[k]));
        }
        guard += uint32_t(sum) * guard_factor(uint32_t((place + i) / 64));
    }
    return guard;
}

// How many of n bits are set; behind them there are zeros.
FP16OPT_HD int64_t count_bits(const uint64_t* bits, int64_t n) {
    int64_t count = 0;
    for (int64_t w = 0; w * 64 < n; ++w) count += __builtin_popcountll(bits[w]);
    return count;
}

FP16OPT_HD uint64_t digest_words(const uint16_t* words, int64_t n, uint32_t first) {
    uint64_t sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += digest_term(words[i], first + uint32_t(i));
    return sum;
}

FP16OPT_END
