// The CPU loops of the steps whose state is kept in 8 bits: a block of 128 elements at a time, in two halves of 64. As in
// launch/steps.h the last, incomplete block goes through the same code in padded copies.
#pragma once

#include "split.h"

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
FP16OPT_HD Floats to_floats(Words x) { return _mm512_cvtepi32_ps(__m512i(x)); }
FP16OPT_HD Words to_words(Floats x) { return Words(_mm512_cvttps_epi32(x)); }
#elif defined(FP16OPT_AVX2)
typedef uint32_t Words __attribute__((vector_size(32)));
FP16OPT_HD Floats smaller(Floats a, float b) { return _mm256_min_ps(a, splat(b)); }
FP16OPT_HD Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
FP16OPT_HD Floats ratio_or_zero(Floats a, Floats b) {
    return _mm256_and_ps(_mm256_cmp_ps(b, _mm256_setzero_ps(), _CMP_GT_OQ), a / b);
}
FP16OPT_HD Words smaller_word(Words a, uint32_t b) { return Words(_mm256_min_epu32(__m256i(a), _mm256_set1_epi32(int(b)))); }
FP16OPT_HD Words larger_word(Words a, Words b) { return Words(_mm256_max_epu32(__m256i(a), __m256i(b))); }
FP16OPT_HD Floats to_floats(Words x) { return _mm256_cvtepi32_ps(__m256i(x)); }
FP16OPT_HD Words to_words(Floats x) { return Words(_mm256_cvttps_epi32(x)); }
#else
typedef uint32_t Words;
FP16OPT_HD float larger(float a, float b) { return a > b ? a : b; }
#endif

FP16OPT_END

#include "../functors/ratio8.h"

FP16OPT_BEGIN

constexpr int kWidth = int(sizeof(Floats) / sizeof(float));

// 64 codes, each in 32 bits.
struct Codes {
    Words v[kVectors];
};

// `valid` of them from memory, and zeros behind.
template <class Code>
FP16OPT_HD void load_codes(const Code* from, Codes& codes) {
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
template <class Code>
FP16OPT_HD void get(const Code* from, int valid, Codes& codes) {
    if (valid == kBlock) return load_codes(from, codes);
    Code padded[kBlock] = {};
    memcpy(padded, from, size_t(valid) * sizeof(Code));
    load_codes(static_cast<const Code*>(padded), codes);
}

// The low bytes.
FP16OPT_HD void store_codes(void* to, const Codes& codes) {
    uint8_t* bytes = static_cast<uint8_t*>(to);
#if defined(FP16OPT_AVX512)
    for (int k = 0; k < kVectors; ++k) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 16 * k), _mm512_cvtepi32_epi8(__m512i(codes.v[k])));
    }
#elif defined(FP16OPT_AVX2)
    const __m256i low = _mm256_set1_epi32(0xff), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (int k = 0; k < kVectors; k += 4) {
        __m256i v[4];
        for (int j = 0; j < 4; ++j) v[j] = _mm256_and_si256(__m256i(codes.v[k + j]), low);
        const __m256i packed = _mm256_packus_epi16(_mm256_packus_epi32(v[0], v[1]), _mm256_packus_epi32(v[2], v[3]));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes + 8 * k), _mm256_permutevar8x32_epi32(packed, order));
    }
#else
    for (int k = 0; k < kVectors; ++k) bytes[k] = uint8_t(codes.v[k]);
#endif
}
FP16OPT_HD void set(void* to, int valid, const Codes& codes) {
    if (valid == kBlock) return store_codes(to, codes);
    uint8_t padded[kBlock];
    store_codes(padded, codes);
    memcpy(to, padded, size_t(valid));
}

// The dithers of 64 elements, of which `first` is the first one's.
FP16OPT_HD void dithers_from(uint32_t first, Codes& dithers) {
#if defined(FP16OPT_AVX512) || defined(FP16OPT_AVX2)
    Words at;
    for (int lane = 0; lane < kWidth; ++lane) at[lane] = uint32_t(lane) * kIndexStride;
    at = at + first;
    for (int k = 0; k < kVectors; ++k) {
        dithers.v[k] = at;
        at = at + uint32_t(kWidth) * kIndexStride;
    }
#else
    for (int k = 0; k < kVectors; ++k) dithers.v[k] = first + uint32_t(k) * kIndexStride;
#endif
}

FP16OPT_HD float largest_of(const Floats (&values)[2 * kVectors]) {
    Floats most = values[0];
    for (int k = 1; k < 2 * kVectors; ++k) most = larger(most, values[k]);
    float lanes[kWidth];
    memcpy(lanes, &most, sizeof(lanes));
    float found = lanes[0];
    for (int k = 1; k < kWidth; ++k) found = lanes[k] > found ? lanes[k] : found;
    return found;
}

// Calls half(h, at, valid) for the halves of the block that begins at `i`.
template <class Half>
FP16OPT_HD void for_halves(int64_t i, int64_t n, Half&& half) {
    for (int h = 0; h < 2; ++h) {
        const int64_t at = i + h * kBlock;
        if (at < n) half(h, at, n - at < kBlock ? int(n - at) : kBlock);
    }
}

// Where the state of a chunk is. `second` is null for SGD; `dither` is the first element's.
struct StateCodes {
    int8_t* first;
    uint8_t* second;
    float* scales;
    float limit;
    uint32_t dither;
};

template <class Grad, class Master>
FP16OPT_HD void adam8_loop(const AdamTerms<Floats>& terms, const Grad* grad, Master& master, const StateCodes& state,
                           int64_t n) {
    const Floats unit = splat(state.limit * kRatioUnit), units = splat(kRatios * (1.0f / state.limit));
    for (int64_t i = 0; i < n; i += kStateBlock) {
        float& scale = state.scales[i / kStateBlock];
        const Floats scales = splat(scale);
        Floats kept[2 * kVectors];
        Codes dithers[2];
        if (i + kBlock >= n) memset(kept, 0, sizeof(kept));
        for_halves(i, n, [&](int h, int64_t at, int valid) {
            Block g, p;
            Codes first, second;
            get(grad + at, valid, g);
            master.read(at, valid, p);
            get(static_cast<const int8_t*>(state.first + at), valid, first);
            get(static_cast<const uint8_t*>(state.second + at), valid, second);
            dithers_from(state.dither + uint32_t(at) * kIndexStride, dithers[h]);
            for (int k = 0; k < kVectors; ++k) {
                const Floats was = root_of_code(second.v[k], scales);
                Floats m = signed_of_code(first.v[k], was, unit), v = was * was;
                adam(terms, g.v[k], p.v[k], m, v, static_cast<Floats*>(nullptr));
                kept[h * kVectors + k] = root_to_keep(v);
                first.v[k] = signed_code(m, kept[h * kVectors + k], units, ratio_dither(dithers[h].v[k]));
            }
            master.write(at, valid, p);
            set(state.first + at, valid, first);
        });
        scale = largest_of(kept);
        if (FP16OPT_UNLIKELY(!(scale >= kLeastScale))) {
            scale = 0.0f;
            const size_t valid = size_t(n - i < kStateBlock ? n - i : kStateBlock);
            memset(state.first + i, 0, valid);
            memset(state.second + i, 0, valid);
            continue;
        }
        const Floats per_scale = splat(1.0f / scale);
        for_halves(i, n, [&](int h, int64_t at, int valid) {
            Codes second;
            for (int k = 0; k < kVectors; ++k) {
                second.v[k] = root_code(kept[h * kVectors + k], per_scale, dithers[h].v[k]);
            }
            set(state.second + at, valid, second);
        });
    }
    master.finish();
}

template <class Grad, class Master, bool kFirst>
FP16OPT_HD void sgd8_loop(const SgdTerms<Floats>& terms, const Grad* grad, Master& master, const StateCodes& state,
                          int64_t n) {
    const Floats unit = splat(kRatioUnit), units = splat(kRatios);
    for (int64_t i = 0; i < n; i += kStateBlock) {
        float& scale = state.scales[i / kStateBlock];
        const Floats scales = splat(kFirst ? 0.0f : scale);
        Floats magnitudes[2 * kVectors];
        Block momenta[2];
        if (i + kBlock >= n) memset(magnitudes, 0, sizeof(magnitudes));
        for_halves(i, n, [&](int h, int64_t at, int valid) {
            Block g, p;
            get(grad + at, valid, g);
            master.read(at, valid, p);
            Codes codes;
            if constexpr (!kFirst) get(static_cast<const int8_t*>(state.first + at), valid, codes);
            for (int k = 0; k < kVectors; ++k) {
                Floats& momentum = momenta[h].v[k];
                momentum = kFirst ? g.v[k] : signed_of_code(codes.v[k], scales, unit);
                sgd<kFirst>(terms, g.v[k], p.v[k], &momentum);
                magnitudes[h * kVectors + k] = smaller(magnitude_of(momentum, Words()), kLargestMomentum);
            }
            master.write(at, valid, p);
        });
        scale = largest_of(magnitudes);
        if (!(scale >= kLeastMomentum)) {
            scale = 0.0f;
            memset(state.first + i, 0, size_t(n - i < kStateBlock ? n - i : kStateBlock));
            continue;
        }
        const Floats per = splat(scale);
        for_halves(i, n, [&](int h, int64_t at, int valid) {
            Codes codes, dithers;
            dithers_from(state.dither + uint32_t(at) * kIndexStride, dithers);
            for (int k = 0; k < kVectors; ++k) {
                codes.v[k] = signed_code(momenta[h].v[k], per, units, ratio_dither(dithers.v[k]));
            }
            set(state.first + at, valid, codes);
        });
    }
    master.finish();
}

FP16OPT_END
