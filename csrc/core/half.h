// float16 <-> float32: nearest, ties to even, subnormals kept. By integer arithmetic, whatever the FPU's flush mode, or by
// the GPU's converters, which PTX defines to do the same (payloads of nans aside).
#pragma once

#include "macros.h"

FP16OPT_BEGIN

FP16OPT_HD float half_to_float(uint16_t half) {
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
    return value;
#else
    const uint32_t sign = uint32_t(half & 0x8000u) << 16;
    const uint32_t magnitude = uint32_t(half & 0x7fffu) << 13;
    // Normal: rebias the exponent by 112. Inf and nan: lift the exponent to 255, and make nan quiet as converters do.
    uint32_t bits = magnitude + 0x38000000u;
    bits = magnitude >= 0x0f800000u ? magnitude + 0x70000000u : bits;
    bits = magnitude > 0x0f800000u ? bits | 0x00400000u : bits;
    // Subnormal: 2^-14 * 1.m - 2^-14 is exact, and neither operand is subnormal in float32.
    const uint32_t shifted = bit_cast<uint32_t>(bit_cast<float>(magnitude + 0x38800000u) - bit_cast<float>(0x38800000u));
    bits = magnitude < 0x00800000u ? shifted : bits;
    return bit_cast<float>(sign | bits);
#endif
}

FP16OPT_HD uint16_t float_to_half(float value) {
#if defined(__CUDA_ARCH__)
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
#else
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    // Normal result: rebias, then round by adding half an ulp less one, plus the last kept bit. A carry out of the
    // mantissa moves the exponent, which is what rounding up to the next binade means.
    const uint32_t rebased = magnitude - 0x38000000u;
    uint32_t result = (rebased + 0x0fffu + ((rebased >> 13) & 1u)) >> 13;
    // Subnormal result: adding 0.5 aligns the last kept bit with float32's, so the addition itself rounds to even.
    // Larger values are replaced by 0 first: the line below does not look at their sum.
    const uint32_t small = magnitude < 0x38800000u ? magnitude : 0u;
    const uint32_t aligned = bit_cast<uint32_t>(bit_cast<float>(small) + 0.5f) - 0x3f000000u;
    result = magnitude < 0x38800000u ? aligned : result;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // from 65520 on: infinite
    result = magnitude > 0x7f800000u ? 0x7e00u | ((magnitude >> 13) & 0x3ffu) : result;
    return uint16_t(result | ((bits >> 16) & 0x8000u));
#endif
}

FP16OPT_END
