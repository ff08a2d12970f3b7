// The operations besides + - * / that steps need, for one float. Vectors have theirs in launch/simd.h.
#pragma once

#include "../core/macros.h"

FP16OPT_BEGIN

constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding and subtracting it rounds to a whole number

// Correctly rounded.
FP16OPT_HD float root(float x) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x);
#endif
}

FP16OPT_HD double square_root(double x) {
#if defined(__CUDA_ARCH__)
    return __dsqrt_rn(x);
#else
    return __builtin_sqrt(x);
#endif
}

// A nan in either is a nan in the result, as in torch.maximum.
FP16OPT_HD float maximum(float a, float b) { return a > b || a != a ? a : b; }

// 1, -1, or 0 for zeros and for nan, as torch.sign.
FP16OPT_HD float sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f; }

// x / by, correctly rounded, for a root `x` >= 0 and the same `by` over and over. `inverse` is 1 / by, rounded; a vector
// spends two fused operations on it where a division would take longer, and gets the same bits.
FP16OPT_HD float quotient(float x, float by, float inverse) {
    (void)inverse;
    return x / by;
}

// `b` where one of the two is a nan.
FP16OPT_HD float smaller(float a, float b) { return a < b ? a : b; }

// a / b for b > 0; else 0.
FP16OPT_HD float ratio_or_zero(float a, float b) { return b > 0.0f ? a / b : 0.0f; }

// a * b + c for a product that float32 holds exactly: a vector may take one fused operation, and gets the same bits.
FP16OPT_HD float exact_product_plus(float a, float b, float c) { return a * b + c; }

FP16OPT_HD uint32_t smaller_word(uint32_t a, uint32_t b) { return a < b ? a : b; }
FP16OPT_HD uint32_t larger_word(uint32_t a, uint32_t b) { return a > b ? a : b; }

// Whole numbers with a sign: without it, and with the sign of another; x is 0 where `of` is.
FP16OPT_HD uint32_t magnitude_of_word(uint32_t x) { return int32_t(x) < 0 ? 0u - x : x; }
FP16OPT_HD uint32_t with_sign_of(uint32_t x, uint32_t of) { return int32_t(of) < 0 ? 0u - x : x; }

// A float that is not negative, with the sign of a whole number.
FP16OPT_HD float with_sign_of(float x, uint32_t of) { return bit_cast<float>(bit_cast<uint32_t>(x) | (of & 0x80000000u)); }

// x, or `like` where that has another sign.
FP16OPT_HD float signed_as(float x, float like) {
    const uint32_t bits = bit_cast<uint32_t>(x), other = bit_cast<uint32_t>(like);
    const uint32_t differs = 0u - ((bits ^ other) >> 31);
    return bit_cast<float>((bits & ~differs) | (other & differs));
}

// (x - 1) * by for an x of which 1 can be taken without rounding: one fused operation for a vector, and the same bits.
FP16OPT_HD float times_one_less(float x, float by) { return (x - 1.0f) * by; }

// Whole numbers below 2^31, exact below 2^24; and truncated.
FP16OPT_HD float to_floats(uint32_t x) { return float(int32_t(x)); }
FP16OPT_HD uint32_t to_words(float x) { return uint32_t(int32_t(x)); }

FP16OPT_END
