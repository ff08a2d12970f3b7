// Roots and quotients on a GPU without the slow path, for numbers of which a thread knows that they are in range: by its compiler a
// correctly rounded root or quotient is the same guess and the same fused operations, behind a check of its own and a branch.
// Where a branch of each of eight elements is one for all of them, their chains run beside each other. The guess is one of the
// processor's, off by an ulp or two; all guesses within that were tried for all mantissas: the results are correctly rounded but
// for three roots and quotients, and these with guesses that no GPU makes, or its compiler's results would be wrong too.
#pragma once

#include "elementary.h"

FP16OPT_BEGIN

// a * b + c, rounded once.
FP16OPT_HD float fused(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return __builtin_fmaf(a, b, c);
#endif
}

// Where a host runs a kernel, guesses are off by an ulp for some numbers.
FP16OPT_HD float guess(float right) { return bit_cast<float>(bit_cast<uint32_t>(right) + bit_cast<uint32_t>(right) % 3u - 1u); }

// About 1 / x, of a normal number whose inverse is one.
FP16OPT_HD float near_inverse(float x) {
#if defined(__CUDA_ARCH__)
    float near;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
    return near;
#else
    return guess(1.0f / x);
#endif
}
// About 1 / sqrt(x), of a normal number; a nan or infinite for zeros.
FP16OPT_HD float near_inverse_root(float x) {
#if defined(__CUDA_ARCH__)
    float near;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(x));
    return near;
#else
    return guess(1.0f / root(x));
#endif
}

// Correctly rounded for x from 2^-101 on; a nan for 0 and infinity.
FP16OPT_HD float quick_root(float x, float near_inverse) {
    const float near = x * near_inverse, half = near_inverse * 0.5f;
    return fused(fused(-near, near, x), half, near);
}

// 1 / x.
FP16OPT_HD float quick_inverse(float x, float near_inverse) {
    return fused(near_inverse, fused(-x, near_inverse, 1.0f), near_inverse);
}

// a / by, where neither it nor its remainder leaves the normal range, or a is 0; but +0 for -0. `inverse` is 1 / by, rounded.
// A nan where a is infinite or a nan.
FP16OPT_HD float quick_quotient(float a, float by, float inverse) {
    const float near = a * inverse;
    return fused(fused(-by, near, a), inverse, near);
}

// Of two numbers, or of a number and a nan the number.
FP16OPT_HD float larger_of(float a, float b) {
#if defined(__CUDA_ARCH__)
    return fmaxf(a, b);
#else
    return a > b || b != b ? a : b;
#endif
}

// -- bytes -------------------------------------------------------------------------------------------------------------

// Four of the eight bytes of a and b: nibbles of `which` say which, from the lowest.
FP16OPT_HD uint32_t permuted(uint32_t a, uint32_t b, uint32_t which) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(a, b, which);
#else
    const uint64_t both = a | uint64_t(b) << 32;
    uint32_t made = 0;
    for (int k = 0; k < 4; ++k) made |= uint32_t(both >> (which >> (4 * k) & 7u) * 8 & 0xffu) << (8 * k);
    return made;
#endif
}
FP16OPT_HD uint32_t lower_halves(uint32_t a, uint32_t b) { return permuted(a, b, 0x5410u); }
FP16OPT_HD uint32_t upper_halves(uint32_t a, uint32_t b) { return permuted(a, b, 0x7632u); }
// `words` with the lowest byte of another word as the k-th.
FP16OPT_HD void put_byte(uint32_t* words, int k, uint32_t byte) {
    const uint32_t whole = 0x3210u, shift = 4u * uint32_t(k % 4);
    words[k / 4] = k % 4 == 0 ? byte : permuted(words[k / 4], byte, (whole & ~(0xfu << shift)) | 4u << shift);
}

// Whole numbers as floats without a conversion, which a GPU has a quarter of the units for: the mantissa of a power of two.
// The k-th byte of words, and the upper 16 bits of a word times 2^-16.
FP16OPT_HD float byte_as_float(const uint32_t* words, int k) {
    return bit_cast<float>(permuted(words[k / 4], 0x4b000000u, 0x7440u | uint32_t(k % 4))) - 0x1p23f;
}
FP16OPT_HD float upper_as_fraction(uint32_t word) { return bit_cast<float>(permuted(word, 0x43000000u, 0x7632u)) - 0x1p7f; }

// A number from 0 to below 2^23, truncated, in the lower bits of a word.
FP16OPT_HD uint32_t whole_bits(float x) {
#if defined(__CUDA_ARCH__)
    return bit_cast<uint32_t>(__fadd_rd(x, 0x1p23f));
#else
    return bit_cast<uint32_t>(float(int32_t(x)) + 0x1p23f);
#endif
}

// -- eight elements, one after the other -------------------------------------------------------------------------------

// A loop over eight elements that is not unrolled finds none of an array by its number, or this would lie in memory: it takes the
// first and puts what it made of it behind the last.
FP16OPT_HD float taken(const float (&values)[8]) { return values[0]; }
FP16OPT_HD void put_behind(float (&values)[8], float value) {
    for (int k = 0; k < 7; ++k) values[k] = values[k + 1];
    values[7] = value;
}
// Of bytes in two words.
FP16OPT_HD uint8_t taken(const uint32_t (&words)[2]) { return uint8_t(words[0]); }
FP16OPT_HD void put_behind(uint32_t (&words)[2], uint32_t byte) {
    words[0] = words[0] >> 8 | words[1] << 24;
    words[1] = words[1] >> 8 | byte << 24;
}

FP16OPT_END
