// 64 elements in registers, at the SIMD level that this file is compiled for. Arithmetic is left to the functors: a
// Block is a few vectors to which they are applied. Here is only what differs between instruction sets: loading,
// converting, storing, comparing and moving lanes. Every level gives the same bits.
#pragma once

#include "../functors/cast.h"
#include "../functors/l2norm.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define FP16OPT_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#define FP16OPT_AVX2 1
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__ARM_NEON)
#define FP16OPT_NEON 1
#include <arm_neon.h>
#endif

FP16OPT_BEGIN

constexpr int kBlock = 64;  // elements

// 2^-52, as bits: eight squares of what is smaller are below kLeastSum together, whatever float32 makes of them.
constexpr uint32_t kSurelyTiny = (127u - 52u) << 23;
static_assert(kLeastSum == 0x1p-100f, "8 * 2^-104 must be less");

#if defined(FP16OPT_AVX512) || defined(FP16OPT_AVX2)

// 64 elements in 256-bit vectors, with which every x86 level sums squares: with 512-bit vectors that takes 15% longer on
// Zen 4, where lane moves and conversions compete for the same two ports.
struct Block256 {
    __m256 v[8];
};

// Puts bytes of the 16 at `from` where `places` says; a negative one makes a zero. It takes half of what widening takes,
// which moves between the halves of a vector.
FP16OPT_HD __m256i spread(const void* from, __m256i places) {
    const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(from));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), places);
}
// Eight numbers of 16 bits, in the upper halves of 32.
FP16OPT_HD __m256i spread_shorts(const void* from) {
    return spread(from, _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7, -1, -1, 8, 9, -1, -1, 10, 11,
                                         -1, -1, 12, 13, -1, -1, 14, 15));
}

FP16OPT_HD void load(const float* from, Block256& b) {
    for (int i = 0; i < 8; ++i) b.v[i] = _mm256_loadu_ps(from + 8 * i);
}
FP16OPT_HD void load(const Half* from, Block256& b) {
    for (int i = 0; i < 8; ++i) {
        b.v[i] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 8 * i)));
    }
}
FP16OPT_HD void load(const BFloat16* from, Block256& b) {
    for (int i = 0; i < 8; ++i) b.v[i] = _mm256_castsi256_ps(spread_shorts(from + 8 * i));
}

FP16OPT_HD void store(float* to, const Block256& b, bool stream) {
    if (stream) {
        for (int i = 0; i < 8; ++i) _mm256_stream_ps(to + 8 * i, b.v[i]);
    } else {
        for (int i = 0; i < 8; ++i) _mm256_storeu_ps(to + 8 * i, b.v[i]);
    }
}

// Whether the magnitude of an element, as bits, is `limit` or more: 0x7f800000 finds infinities and nans.
FP16OPT_HD bool any_from(const Block256& b, uint32_t limit) {
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i largest = _mm256_and_si256(_mm256_castps_si256(b.v[0]), mask);
    for (int i = 1; i < 8; ++i) {
        largest = _mm256_max_epu32(largest, _mm256_and_si256(_mm256_castps_si256(b.v[i]), mask));
    }
    // Magnitudes have no sign bit, so the signed comparison orders them.
    const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(int(limit)), largest);
    return _mm256_movemask_epi8(below) != -1;
}

// The sums of the eight groups of a block in float32, four groups side by side; between the additions lanes move.
struct GroupSums {
    __m256 fours[2];  // of groups 0 to 3 and 4 to 7: the sums of their first four elements, then of their last four
    __m256 sums;

    explicit FP16OPT_HD GroupSums(const Block256& b) {
        for (int half = 0; half < 2; ++half) {
            __m256 pairs[2];
            for (int k = 0; k < 2; ++k) {
                const __m256 low = b.v[4 * half + 2 * k], high = b.v[4 * half + 2 * k + 1];
                const __m256 even = _mm256_shuffle_ps(low, high, 0x88), odd = _mm256_shuffle_ps(low, high, 0xdd);
                pairs[k] = square(even) + square(odd);
            }
            fours[half] = _mm256_shuffle_ps(pairs[0], pairs[1], 0x88) + _mm256_shuffle_ps(pairs[0], pairs[1], 0xdd);
        }
        sums = _mm256_permute2f128_ps(fours[0], fours[1], 0x20) + _mm256_permute2f128_ps(fours[0], fours[1], 0x31);
    }
    FP16OPT_HD __m256 in_range() const {
        const __m256 enough = _mm256_cmp_ps(sums, _mm256_set1_ps(kLeastSum), _CMP_GE_OQ);
        return _mm256_and_ps(enough, _mm256_cmp_ps(sums, _mm256_set1_ps(kMostSum), _CMP_LE_OQ));
    }
    // What four groups add to their lanes where they are in range.
    template <class Of>
    FP16OPT_HD __m256d terms(int half) const {
        const __m256 of = kSumsStored<Of> ? sums : fours[half];
        const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(of)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(of, 1));
        return !kSumsStored<Of> ? low + high : half == 0 ? low : high;
    }
};

// Adds the terms of the eight groups of a block to eight consecutive lanes, with the bits of group_term. False, and nothing
// is added, where one of them has left float32's range.
template <class Of>
FP16OPT_HD bool add_groups(const Block256& b, double* lanes) {
    const GroupSums groups(b);
    if (!kStaysInRange<Of> && FP16OPT_UNLIKELY(_mm256_movemask_ps(groups.in_range()) != 0xff)) return false;
    for (int half = 0; half < 2; ++half) {
        double* at = lanes + 4 * half;
        _mm256_store_pd(at, _mm256_load_pd(at) + groups.terms<Of>(half));
    }
    return true;
}

// What four groups add where they are not in range: squares and sums in doubles. Memory is widened without moving lanes.
FP16OPT_HD __m256d wide_terms(const float* groups) {
    __m256d pairs[4];  // of each group: elements 0 + 1, 4 + 5, 2 + 3, 6 + 7
    for (int g = 0; g < 4; ++g) {
        const __m256d low = _mm256_cvtps_pd(_mm_load_ps(groups + 8 * g));
        const __m256d high = _mm256_cvtps_pd(_mm_load_ps(groups + 8 * g + 4));
        pairs[g] = _mm256_hadd_pd(square(low), square(high));
    }
    __m256d fours[2];  // of two groups each: the first four elements, the last four
    for (int k = 0; k < 2; ++k) {
        fours[k] = _mm256_permute2f128_pd(pairs[2 * k], pairs[2 * k + 1], 0x20) +
                   _mm256_permute2f128_pd(pairs[2 * k], pairs[2 * k + 1], 0x31);
    }
    return _mm256_permute4x64_pd(_mm256_hadd_pd(fours[0], fours[1]), 0xd8);
}

// add_groups for any numbers. True where all of them are tiny, and not all zero: in tensors of such the next block is best
// brought here at once, because their squares are subnormal in float32, and processors take many times as long for these.
template <class Of>
FP16OPT_NOINLINE static bool add_groups_of_any_range(const Block256& b, double* lanes) {
    if (!any_from(b, 1)) return false;
    alignas(32) float values[kBlock];
    store(values, b, false);
    if (!any_from(b, kSurelyTiny)) {
        for (int k = 0; k < 8; k += 4) _mm256_store_pd(lanes + k, _mm256_load_pd(lanes + k) + wide_terms(values + 8 * k));
        return true;
    }
    const GroupSums groups(b);
    const __m256i near = _mm256_castps_si256(groups.in_range());
    for (int half = 0; half < 2; ++half) {
        const __m128i four = half == 0 ? _mm256_castsi256_si128(near) : _mm256_extracti128_si256(near, 1);
        const __m256d takes_near = _mm256_castsi256_pd(_mm256_cvtepi32_epi64(four));
        double* at = lanes + 4 * half;
        _mm256_store_pd(at, _mm256_load_pd(at) +
                                _mm256_blendv_pd(wide_terms(values + 32 * half), groups.terms<Of>(half), takes_near));
    }
    return false;
}

typedef Block256 SumBlock;
FP16OPT_HD __m256 splat_for_sum(float x) { return _mm256_set1_ps(x); }
FP16OPT_HD void finish_streaming() { _mm_sfence(); }
constexpr bool kCanStream = true;

#endif

#if defined(FP16OPT_AVX512)

typedef __m512 Floats;
FP16OPT_HD Floats splat(float x) { return _mm512_set1_ps(x); }
// A number of 32 bits that the compiler does not know: what it knows it makes anew in each block, and to bring that from a general
// register to a vector takes two operations of the units that loops wait for.
FP16OPT_HD __m512i splat_bits(uint32_t x) {
    __m512i bits = _mm512_set1_epi32(int(x));
    asm("" : "+v"(bits));
    return bits;
}
struct Block {
    Floats v[4];
};
struct Narrow {  // 64 elements of 16 bits
    __m512i v[2];
};

FP16OPT_HD void load(const float* from, Block& b) {
    for (int i = 0; i < 4; ++i) b.v[i] = _mm512_loadu_ps(from + 16 * i);
}
FP16OPT_HD void load(const Half* from, Block& b) {
    for (int i = 0; i < 4; ++i) {
        b.v[i] = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 16 * i)));
    }
}
FP16OPT_HD void load(const BFloat16* from, Block& b) {
    for (int i = 0; i < 4; ++i) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 16 * i));
        b.v[i] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }
}

FP16OPT_HD void store(float* to, const Block& b) {
    for (int i = 0; i < 4; ++i) _mm512_storeu_ps(to + 16 * i, b.v[i]);
}
FP16OPT_HD void store(void* to, const Narrow& n, bool stream) {
    __m512i* at = static_cast<__m512i*>(to);
    if (stream) {
        for (int i = 0; i < 2; ++i) _mm512_stream_si512(at + i, n.v[i]);
    } else {
        for (int i = 0; i < 2; ++i) _mm512_storeu_si512(at + i, n.v[i]);
    }
}
FP16OPT_HD void load(const void* from, Narrow& n) {
    for (int i = 0; i < 2; ++i) n.v[i] = _mm512_loadu_si512(static_cast<const __m512i*>(from) + i);
}

// Whether the magnitude of one of 64 elements of 16 bits, as bits, is `limit` or more.
FP16OPT_HD bool any_from(const Narrow& n, uint32_t limit) {
    const __m512i mask = splat_bits(0x7fff7fffu);
    const __m512i largest = _mm512_max_epu16(_mm512_and_si512(n.v[0], mask), _mm512_and_si512(n.v[1], mask));
    return _mm512_cmpge_epu16_mask(largest, splat_bits(limit << 16 | limit)) != 0;
}
// Stores numbers as halves, and gives back what they are.
FP16OPT_HD Floats store_rounded(Half* to, Floats x) {
    const __m256i halves = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
    return _mm512_cvtph_ps(halves);
}

FP16OPT_HD __m256i round_bfloat16(Floats x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x00400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}
FP16OPT_HD void narrow_to(Half, const Block& b, Narrow& n) {
    for (int i = 0; i < 2; ++i) {
        const __m256i low = _mm512_cvtps_ph(b.v[2 * i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m256i high = _mm512_cvtps_ph(b.v[2 * i + 1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        n.v[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
}
FP16OPT_HD void narrow_to(BFloat16, const Block& b, Narrow& n) {
    for (int i = 0; i < 2; ++i) {
        const __m256i low = round_bfloat16(b.v[2 * i]);
        n.v[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low), round_bfloat16(b.v[2 * i + 1]), 1);
    }
}

// Finite numbers that stay so as bfloat16, rounded to nearest, ties away from zero.
FP16OPT_HD __m256i round_away(Floats x) {
    const __m512i rounded = _mm512_add_epi32(_mm512_castps_si512(x), splat_bits(0x8000u));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
FP16OPT_HD void narrow_away(const Block& b, Narrow& n) {
    for (int i = 0; i < 2; ++i) {
        n.v[i] = _mm512_inserti64x4(_mm512_castsi256_si512(round_away(b.v[2 * i])), round_away(b.v[2 * i + 1]), 1);
    }
}

FP16OPT_HD bool any_from(const Block& b, uint32_t limit) {
    const __m512i mask = splat_bits(0x7fffffffu);
    __m512i largest = _mm512_and_si512(_mm512_castps_si512(b.v[0]), mask);
    for (int i = 1; i < 4; ++i) {
        largest = _mm512_max_epu32(largest, _mm512_and_si512(_mm512_castps_si512(b.v[i]), mask));
    }
    return _mm512_cmpge_epu32_mask(largest, splat_bits(limit)) != 0;
}

#elif defined(FP16OPT_AVX2)

typedef __m256 Floats;
FP16OPT_HD Floats splat(float x) { return _mm256_set1_ps(x); }
typedef Block256 Block;
struct Narrow {
    __m256i v[4];
};

FP16OPT_HD void store(float* to, const Block& b) { store(to, b, false); }
FP16OPT_HD void store(void* to, const Narrow& n, bool stream) {
    __m256i* at = static_cast<__m256i*>(to);
    if (stream) {
        for (int i = 0; i < 4; ++i) _mm256_stream_si256(at + i, n.v[i]);
    } else {
        for (int i = 0; i < 4; ++i) _mm256_storeu_si256(at + i, n.v[i]);
    }
}
FP16OPT_HD void load(const void* from, Narrow& n) {
    for (int i = 0; i < 4; ++i) n.v[i] = _mm256_loadu_si256(static_cast<const __m256i*>(from) + i);
}

// Whether the magnitude of one of 64 elements of 16 bits, as bits, is `limit` or more.
FP16OPT_HD bool any_from(const Narrow& n, uint32_t limit) {
    const __m256i mask = _mm256_set1_epi16(0x7fff);
    __m256i largest = _mm256_and_si256(n.v[0], mask);
    for (int i = 1; i < 4; ++i) largest = _mm256_max_epu16(largest, _mm256_and_si256(n.v[i], mask));
    return _mm256_movemask_epi8(_mm256_cmpgt_epi16(_mm256_set1_epi16(short(limit)), largest)) != -1;
}
// Stores numbers as halves, and gives back what they are.
FP16OPT_HD Floats store_rounded(Half* to, Floats x) {
    const __m128i halves = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
    return _mm256_cvtph_ps(halves);
}

FP16OPT_HD __m256i round_bfloat16(Floats x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
FP16OPT_HD void narrow_to(Half, const Block& b, Narrow& n) {
    for (int i = 0; i < 4; ++i) {
        const __m128i low = _mm256_cvtps_ph(b.v[2 * i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        const __m128i high = _mm256_cvtps_ph(b.v[2 * i + 1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        n.v[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    }
}
FP16OPT_HD void narrow_to(BFloat16, const Block& b, Narrow& n) {
    for (int i = 0; i < 4; ++i) {
        // packus works within 128-bit halves; the permutation puts the quarters back in order.
        const __m256i packed = _mm256_packus_epi32(round_bfloat16(b.v[2 * i]), round_bfloat16(b.v[2 * i + 1]));
        n.v[i] = _mm256_permute4x64_epi64(packed, 0xd8);
    }
}
// Finite numbers that stay so as bfloat16, rounded to nearest, ties away from zero.
FP16OPT_HD __m256i round_away(Floats x) {
    return _mm256_srli_epi32(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_set1_epi32(0x8000)), 16);
}
FP16OPT_HD void narrow_away(const Block& b, Narrow& n) {
    for (int i = 0; i < 4; ++i) {
        const __m256i packed = _mm256_packus_epi32(round_away(b.v[2 * i]), round_away(b.v[2 * i + 1]));
        n.v[i] = _mm256_permute4x64_epi64(packed, 0xd8);
    }
}

#else  // plain C++, which the compiler vectorises for the baseline; on ARM with NEON's float16 converters

typedef float Floats;
FP16OPT_HD Floats splat(float x) { return x; }
FP16OPT_HD Floats splat_for_sum(float x) { return x; }
struct Block {
    Floats v[kBlock];
};
struct Narrow {
    uint16_t v[kBlock];
};

template <class From>
FP16OPT_HD void load(const From* from, Block& b) {
    From values[kBlock];
    memcpy(values, from, sizeof(values));
    for (int i = 0; i < kBlock; ++i) b.v[i] = widen(values[i]);
}
FP16OPT_HD void store(float* to, const Block& b, bool = false) { memcpy(to, b.v, sizeof(b.v)); }
FP16OPT_HD void store(void* to, const Narrow& n, bool) { memcpy(to, n.v, sizeof(n.v)); }
FP16OPT_HD void load(const void* from, Narrow& n) { memcpy(n.v, from, sizeof(n.v)); }

template <class To>
FP16OPT_HD void narrow_to(To, const Block& b, Narrow& n) {
    for (int i = 0; i < kBlock; ++i) n.v[i] = narrow<To>(b.v[i]).bits;
}
FP16OPT_HD Floats store_rounded(Half* to, Floats x) {
    to->bits = float_to_half(x);
    return half_to_float(to->bits);
}
// Finite numbers that stay so as bfloat16, rounded to nearest, ties away from zero.
FP16OPT_HD void narrow_away(const Block& b, Narrow& n) {
    for (int i = 0; i < kBlock; ++i) n.v[i] = uint16_t((bit_cast<uint32_t>(b.v[i]) + 0x8000u) >> 16);
}

#if defined(FP16OPT_NEON)
FP16OPT_HD void load(const Half* from, Block& b) {
    for (int i = 0; i < kBlock; i += 4) {
        uint16x4_t bits;
        memcpy(&bits, from + i, sizeof(bits));
        vst1q_f32(b.v + i, vcvt_f32_f16(vreinterpret_f16_u16(bits)));
    }
}
FP16OPT_HD void narrow_to(Half, const Block& b, Narrow& n) {
    for (int i = 0; i < kBlock; i += 4) {
        vst1_u16(n.v + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(b.v + i))));
    }
}
#endif

FP16OPT_HD bool any_from(const Block& b, uint32_t limit) {
    uint32_t found = 0;
    for (int i = 0; i < kBlock; ++i) found |= uint32_t((bit_cast<uint32_t>(b.v[i]) & 0x7fffffffu) >= limit);
    return found != 0;
}

template <class Of>
FP16OPT_HD bool add_groups(const Block& b, double* lanes) {
    constexpr int kGroups = kBlock / kGroup;
    float front[kGroups], back[kGroups];
    bool in_range = true;
    for (int g = 0; g < kGroups; ++g) {
        front[g] = four_squares(b.v + g * kGroup);
        back[g] = four_squares(b.v + g * kGroup + 4);
        in_range &= kStaysInRange<Of> || is_in_range(front[g] + back[g]);
    }
    if (FP16OPT_UNLIKELY(!in_range)) return false;
    for (int g = 0; g < kGroups; ++g) {
        lanes[g] += kSumsStored<Of> ? double(front[g] + back[g]) : double(front[g]) + double(back[g]);
    }
    return true;
}

// Sums of neighbours, half as many.
template <class T>
FP16OPT_HD void add_neighbours(const T* from, T* to, int count) {
    for (int i = 0; i < count; ++i) to[i] = from[2 * i] + from[2 * i + 1];
}

// add_groups for any numbers, in loops that a compiler vectorises. True where all are tiny, and not all zero: in tensors of
// such the next block is best brought here at once, because their squares are subnormal in float32, and processors take
// many times as long for these.
template <class Of>
FP16OPT_NOINLINE static bool add_groups_of_any_range(const Block& b, double* lanes) {
    if (!any_from(b, 1)) return false;
    constexpr int kGroups = kBlock / kGroup;
    alignas(64) double wide[kBlock], wide_pairs[4 * kGroups], wide_fours[2 * kGroups], terms[kGroups];
    for (int i = 0; i < kBlock; ++i) wide[i] = square(double(b.v[i]));
    add_neighbours(wide, wide_pairs, 4 * kGroups);
    add_neighbours(wide_pairs, wide_fours, 2 * kGroups);
    add_neighbours(wide_fours, terms, kGroups);
    const bool tiny = !any_from(b, kSurelyTiny);
    for (int g = 0; g < kGroups; ++g) {
        lanes[g] += tiny ? terms[g] : group_term<Of>(b.v + g * kGroup);
    }
    return tiny;
}

typedef Block SumBlock;
FP16OPT_HD void finish_streaming() {}
constexpr bool kCanStream = false;

#endif

FP16OPT_END
