// Whole numbers of 32 bits beside the floats of a block, and codes of 8 bits in memory, at the SIMD level that this file is
// compiled for. Every level gives the same bits.
#pragma once

#include "steps.h"

FP16OPT_BEGIN

// For vectors what functors/elementary.h has for one number.
#if defined(FP16OPT_AVX512)
typedef uint32_t Words __attribute__((vector_size(64)));
FP16OPT_HD Floats smaller(Floats a, float b) { return _mm512_min_ps(a, splat(b)); }
FP16OPT_HD Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
FP16OPT_HD float largest_lane(Floats a) { return _mm512_reduce_max_ps(a); }
FP16OPT_HD Words larger_word(Words a, Words b) { return Words(_mm512_max_epu32(__m512i(a), __m512i(b))); }
FP16OPT_HD Words magnitude_of_word(Words x) { return Words(_mm512_abs_epi32(__m512i(x))); }
FP16OPT_HD Floats with_sign_of(Floats x, Words of) {
    const __m512i sign = splat_bits(0x80000000u);
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(_mm512_castps_si512(x), __m512i(of), sign, 0xf8));
}
FP16OPT_HD Floats times_one_less(Floats x, Floats by) { return _mm512_fmsub_ps(x, by, by); }
FP16OPT_HD Words splat_word(uint32_t x) { return Words(splat_bits(x)); }
FP16OPT_HD Floats to_floats(Words x) { return _mm512_cvtepi32_ps(__m512i(x)); }
FP16OPT_HD Words to_words(Floats x) { return Words(_mm512_cvttps_epi32(x)); }
FP16OPT_HD Words nearest_words(Floats x) { return Words(_mm512_cvtps_epi32(x)); }
#elif defined(FP16OPT_AVX2)
typedef uint32_t Words __attribute__((vector_size(32)));
FP16OPT_HD Floats smaller(Floats a, float b) { return _mm256_min_ps(a, splat(b)); }
FP16OPT_HD Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
FP16OPT_HD float largest_lane(Floats a) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
FP16OPT_HD Words larger_word(Words a, Words b) { return Words(_mm256_max_epu32(__m256i(a), __m256i(b))); }
FP16OPT_HD Words magnitude_of_word(Words x) { return Words(_mm256_abs_epi32(__m256i(x))); }
FP16OPT_HD Floats with_sign_of(Floats x, Words of) { return _mm256_blendv_ps(x, -x, bit_cast<Floats>(of)); }
FP16OPT_HD Floats times_one_less(Floats x, Floats by) { return _mm256_fmsub_ps(x, by, by); }
FP16OPT_HD Words splat_word(uint32_t x) { return Words(_mm256_set1_epi32(int(x))); }
FP16OPT_HD Floats to_floats(Words x) { return _mm256_cvtepi32_ps(__m256i(x)); }
FP16OPT_HD Words to_words(Floats x) { return Words(_mm256_cvttps_epi32(x)); }
FP16OPT_HD Words nearest_words(Floats x) { return Words(_mm256_cvtps_epi32(x)); }
#else
typedef uint32_t Words;
FP16OPT_HD uint32_t splat_word(uint32_t x) { return x; }
FP16OPT_HD float larger(float a, float b) { return a > b ? a : b; }
FP16OPT_HD float largest_lane(float a) { return a; }
FP16OPT_HD Words nearest_words(float x) { return to_words((x + kRounder) - kRounder); }
#endif

FP16OPT_END

FP16OPT_BEGIN

constexpr int kWidth = int(sizeof(Floats) / sizeof(float));

// 64 codes, each in 32 bits.
struct Codes {
    Words v[kVectors];
};

// Codes as they are, and those with a sign in the upper byte of 32 bits.
FP16OPT_HD void get(const uint8_t* from, Codes& codes) {
    for (int k = 0; k < kVectors; ++k) {
#if defined(FP16OPT_AVX512)
        codes.v[k] = Words(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * k))));
#elif defined(FP16OPT_AVX2)
        const int at = k % 2 * 8;
        codes.v[k] = Words(spread(from + k / 2 * 16, _mm256_setr_epi8(
            at, -1, -1, -1, at + 1, -1, -1, -1, at + 2, -1, -1, -1, at + 3, -1, -1, -1,
            at + 4, -1, -1, -1, at + 5, -1, -1, -1, at + 6, -1, -1, -1, at + 7, -1, -1, -1)));
#else
        codes.v[k] = from[k];
#endif
    }
}
FP16OPT_HD void get(const int8_t* from, Codes& codes) {
    for (int k = 0; k < kVectors; ++k) {
#if defined(FP16OPT_AVX512)
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * k));
        codes.v[k] = Words(_mm512_slli_epi32(_mm512_cvtepu8_epi32(bytes), 24));
#elif defined(FP16OPT_AVX2)
        const int at = k % 2 * 8;
        codes.v[k] = Words(spread(from + k / 2 * 16, _mm256_setr_epi8(
            -1, -1, -1, at, -1, -1, -1, at + 1, -1, -1, -1, at + 2, -1, -1, -1, at + 3,
            -1, -1, -1, at + 4, -1, -1, -1, at + 5, -1, -1, -1, at + 6, -1, -1, -1, at + 7)));
#else
        codes.v[k] = uint32_t(uint8_t(from[k])) << 24;
#endif
    }
}

#if defined(FP16OPT_AVX512) || defined(FP16OPT_AVX2)

// Two vectors packed into one of numbers half as wide, clamped to the range of these; in an order that store_packed undoes.
#if defined(FP16OPT_AVX512)
typedef __m512i Packed;
FP16OPT_HD Packed shorts_of(Words a, Words b) { return _mm512_packs_epi32(__m512i(a), __m512i(b)); }
FP16OPT_HD Packed unsigned_shorts_of(Words a, Words b) { return _mm512_packus_epi32(__m512i(a), __m512i(b)); }
FP16OPT_HD Packed bytes_of(Packed a, Packed b) { return _mm512_packs_epi16(a, b); }
FP16OPT_HD Packed unsigned_bytes_of(Packed a, Packed b) { return _mm512_packus_epi16(a, b); }
FP16OPT_HD Packed shorts_less(Packed a, uint32_t b) { return _mm512_sub_epi16(a, splat_bits(b << 16 | b)); }
FP16OPT_HD Packed smaller_bytes(Packed a, Packed b) { return _mm512_min_epu8(a, b); }
FP16OPT_HD Packed larger_bytes(Packed a, Packed b) { return _mm512_max_epu8(a, b); }
FP16OPT_HD Packed bytes_with_sign_of(Packed x, Packed of) {
    return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(of), _mm512_setzero_si512(), x);
}
FP16OPT_HD void store_packed(void* to, Packed bytes) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
}
#else
typedef __m256i Packed;
FP16OPT_HD Packed shorts_of(Words a, Words b) { return _mm256_packs_epi32(__m256i(a), __m256i(b)); }
FP16OPT_HD Packed unsigned_shorts_of(Words a, Words b) { return _mm256_packus_epi32(__m256i(a), __m256i(b)); }
FP16OPT_HD Packed bytes_of(Packed a, Packed b) { return _mm256_packs_epi16(a, b); }
FP16OPT_HD Packed unsigned_bytes_of(Packed a, Packed b) { return _mm256_packus_epi16(a, b); }
FP16OPT_HD Packed shorts_less(Packed a, uint32_t b) { return _mm256_sub_epi16(a, _mm256_set1_epi16(short(b))); }
FP16OPT_HD Packed smaller_bytes(Packed a, Packed b) { return _mm256_min_epu8(a, b); }
FP16OPT_HD Packed larger_bytes(Packed a, Packed b) { return _mm256_max_epu8(a, b); }
FP16OPT_HD Packed bytes_with_sign_of(Packed x, Packed of) { return _mm256_sign_epi8(x, of); }
FP16OPT_HD void store_packed(void* to, Packed bytes) {
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    _mm256_storeu_si256(static_cast<__m256i*>(to), _mm256_permutevar8x32_epi32(bytes, order));
}
#endif

FP16OPT_HD Packed packed(const Words* four) { return bytes_of(shorts_of(four[0], four[1]), shorts_of(four[2], four[3])); }

#endif

// Codes with a sign that fit into 8 bits.
FP16OPT_HD void store_codes(int8_t* to, const Codes& codes) {
#if defined(FP16OPT_AVX512)
    for (int k = 0; k < kVectors; ++k) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * k), _mm512_cvtepi32_epi8(__m512i(codes.v[k])));
    }
#elif defined(FP16OPT_AVX2)
    for (int k = 0; k < kVectors; k += 4) store_packed(to + 8 * k, packed(codes.v + k));
#else
    for (int k = 0; k < kVectors; ++k) to[k] = int8_t(codes.v[k]);
#endif
}

// Numbers with a sign, clamped to -127 .. 127.
FP16OPT_HD void store_clamped(int8_t* to, const Codes& numbers) {
#if defined(FP16OPT_AVX512)
    for (int k = 0; k < kVectors; ++k) {
        const __m128i codes = _mm_max_epi8(_mm512_cvtsepi32_epi8(__m512i(numbers.v[k])), _mm_set1_epi8(-127));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * k), codes);
    }
#elif defined(FP16OPT_AVX2)
    for (int k = 0; k < kVectors; k += 4) {
        store_packed(to + 8 * k, _mm256_max_epi8(packed(numbers.v + k), _mm256_set1_epi8(-127)));
    }
#else
    for (int k = 0; k < kVectors; ++k) {
        const int32_t number = int32_t(numbers.v[k]), low = number < -127 ? -127 : number;
        to[k] = int8_t(low > 127 ? 127 : low);
    }
#endif
}

// A number in the upper half, with its sign.
FP16OPT_HD Words upper_half(Words x) {
#if defined(FP16OPT_AVX512)
    return Words(_mm512_srai_epi32(__m512i(x), 16));
#elif defined(FP16OPT_AVX2)
    return Words(_mm256_srai_epi32(__m256i(x), 16));
#else
    return uint32_t(int32_t(x) >> 16);
#endif
}

// Bits 8 to 15 as a number with a sign.
FP16OPT_HD Words second_byte(Words x) {
#if defined(FP16OPT_AVX512)
    return Words(_mm512_srai_epi32(_mm512_slli_epi32(__m512i(x), 16), 24));
#elif defined(FP16OPT_AVX2)
    return Words(_mm256_srai_epi32(_mm256_slli_epi32(__m256i(x), 16), 24));
#else
    return uint32_t(int32_t(int8_t(x >> 8)));
#endif
}

// first, first + stride, first + 2 stride and so on, for the elements of a block.
FP16OPT_HD void words_from(uint32_t first, uint32_t stride, Codes& words) {
#if defined(FP16OPT_AVX512)
    const Words lanes = Words(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    Words at = lanes * stride + first;
#elif defined(FP16OPT_AVX2)
    const Words lanes = Words(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    Words at = lanes * stride + first;
#else
    uint32_t at = first;
#endif
    for (int k = 0; k < kVectors; ++k) {
        words.v[k] = at;
        at = at + uint32_t(kWidth) * stride;
    }
}

FP16OPT_END
