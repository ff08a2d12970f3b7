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
FP16OPT_HD Floats ratio_or_zero(Floats a, Floats b) {
    return _mm512_maskz_div_ps(_mm512_cmp_ps_mask(b, _mm512_setzero_ps(), _CMP_GT_OQ), a, b);
}
FP16OPT_HD Words smaller_word(Words a, uint32_t b) { return Words(_mm512_min_epu32(__m512i(a), _mm512_set1_epi32(int(b)))); }
FP16OPT_HD Words larger_word(Words a, Words b) { return Words(_mm512_max_epu32(__m512i(a), __m512i(b))); }
FP16OPT_HD Words magnitude_of_word(Words x) { return Words(_mm512_abs_epi32(__m512i(x))); }
FP16OPT_HD Words with_sign_of(Words x, Words of) {
    const __mmask16 negative = _mm512_movepi32_mask(__m512i(of));
    return Words(_mm512_mask_sub_epi32(__m512i(x), negative, _mm512_setzero_si512(), __m512i(x)));
}
FP16OPT_HD Words splat_word(uint32_t x) { return Words(_mm512_set1_epi32(int(x))); }
FP16OPT_HD Floats to_floats(Words x) { return _mm512_cvtepi32_ps(__m512i(x)); }
FP16OPT_HD Words to_words(Floats x) { return Words(_mm512_cvttps_epi32(x)); }
#elif defined(FP16OPT_AVX2)
typedef uint32_t Words __attribute__((vector_size(32)));
FP16OPT_HD Floats smaller(Floats a, float b) { return _mm256_min_ps(a, splat(b)); }
FP16OPT_HD Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
FP16OPT_HD Words larger_word(Words a, Words b) { return Words(_mm256_max_epu32(__m256i(a), __m256i(b))); }
FP16OPT_HD Words magnitude_of_word(Words x) { return Words(_mm256_abs_epi32(__m256i(x))); }
FP16OPT_HD Words splat_word(uint32_t x) { return Words(_mm256_set1_epi32(int(x))); }
FP16OPT_HD Floats to_floats(Words x) { return _mm256_cvtepi32_ps(__m256i(x)); }
FP16OPT_HD Words to_words(Floats x) { return Words(_mm256_cvttps_epi32(x)); }
#else
typedef uint32_t Words;
FP16OPT_HD uint32_t splat_word(uint32_t x) { return x; }
FP16OPT_HD float larger(float a, float b) { return a > b ? a : b; }
#endif

FP16OPT_END

FP16OPT_BEGIN

constexpr int kWidth = int(sizeof(Floats) / sizeof(float));

// 64 codes, each in 32 bits.
struct Codes {
    Words v[kVectors];
};

template <class Code>
FP16OPT_HD void get(const Code* from, Codes& codes) {
    for (int k = 0; k < kVectors; ++k) {
#if defined(FP16OPT_AVX512)
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 16 * k));
        codes.v[k] = Words(Code(-1) < 0 ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
#elif defined(FP16OPT_AVX2)
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + 8 * k));
        codes.v[k] = Words(Code(-1) < 0 ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes));
#else
        codes.v[k] = uint32_t(int32_t(from[k]));
#endif
    }
}

// Codes that fit the type of the memory.
template <class Code>
FP16OPT_HD void store_codes(Code* to, const Codes& codes) {
#if defined(FP16OPT_AVX512)
    for (int k = 0; k < kVectors; ++k) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 16 * k), _mm512_cvtepi32_epi8(__m512i(codes.v[k])));
    }
#elif defined(FP16OPT_AVX2)
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int k = 0; k < kVectors; k += 4) {
        const __m256i low = _mm256_packs_epi32(__m256i(codes.v[k]), __m256i(codes.v[k + 1]));
        const __m256i high = _mm256_packs_epi32(__m256i(codes.v[k + 2]), __m256i(codes.v[k + 3]));
        const __m256i packed = Code(-1) < 0 ? _mm256_packs_epi16(low, high) : _mm256_packus_epi16(low, high);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 8 * k), _mm256_permutevar8x32_epi32(packed, order));
    }
#else
    for (int k = 0; k < kVectors; ++k) to[k] = Code(codes.v[k]);
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
