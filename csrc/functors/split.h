// A float32 master as the 16-bit weight of the model and a 16-bit remainder.
//
// bfloat16: the weight is the master rounded to nearest, ties away from zero, and the remainder its low 16 bits. Exact for
// every float32, nan payloads aside. float16: the weight is rounded to nearest, ties to even, and the remainder counts
// steps of 2^-16 of the weight's last place: exact for magnitudes from 2^-16 up to 65520, else within 2^-40. From 65520 on
// the weight is infinite, and the remainder holds the upper bits of the magnitude.
#pragma once

#include "cast.h"
#include "elementary.h"

FP16OPT_BEGIN

constexpr uint32_t kCoarseFrom = 0x477ff000u;   // 65520
constexpr int kCoarseShift = 14;                // bits of a magnitude that the coarse code drops
constexpr uint32_t kCoarseInfinity = 0xffffu;
constexpr float kMostSteps = 32767.0f;

FP16OPT_HD bool is_nan_bits(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }

// The remainder of a weight that stands for itself. A float16 infinity with a remainder of 0 would stand for 65520.
FP16OPT_HD uint16_t plain_remainder(bool half, uint16_t weight) {
    return half && (weight & 0x7fffu) == 0x7c00u ? uint16_t(kCoarseInfinity) : uint16_t(0);
}

// The master that a weight and its remainder add up to, or the weight itself where that has another sign. T is float or a
// vector of floats. A master has the sign of its weight, so it rounds to the weight that is there. Only at zeros the sum may
// have another one, by a remainder to which no master is split: other code has written a zero, and what stands beside
// it belongs to the weight before. The sum would round to the other zero, and of bfloat16 be a nan. A float16 weight of -0
// with no remainder gets its sign back by the same choice: -0 + 0 is 0.
template <class T>
FP16OPT_HD T master_of(T sum, T weight) {
    return signed_as(sum, weight);
}

// -- bfloat16 --------------------------------------------------------------------------------------------------------

FP16OPT_HD uint16_t split_weight(BFloat16, float master) {
    const uint32_t bits = bit_cast<uint32_t>(master);
    return uint16_t(is_nan_bits(bits) ? (bits >> 16) | 0x0040u : (bits + 0x8000u) >> 16);
}
FP16OPT_HD uint16_t split_remainder(BFloat16, float master, float, uint16_t) {
    const uint32_t bits = bit_cast<uint32_t>(master);
    return uint16_t(is_nan_bits(bits) ? 0u : bits & 0xffffu);
}
// The remainder is a signed number: the weight may have been rounded up.
FP16OPT_HD float join(BFloat16, float, uint16_t weight, uint16_t remainder) {
    const uint32_t wide = uint32_t(weight) << 16;
    return master_of(bit_cast<float>(wide + uint32_t(int32_t(int16_t(remainder)))), bit_cast<float>(wide));
}

// -- float16 ---------------------------------------------------------------------------------------------------------

FP16OPT_HD uint16_t split_weight(Half, float master) { return float_to_half(master); }

// The weight's exponent, with subnormals counted as the smallest normal.
FP16OPT_HD uint32_t half_exponent(uint16_t weight) {
    const uint32_t exponent = (uint32_t(weight) >> 10) & 31u;
    return exponent | uint32_t(exponent == 0u);
}

// Below `wide` is the weight as float32. All is computed in 32 bits and chosen by masks: compilers vectorise that, and no
// choice between floats, of which one might trap.
FP16OPT_HD uint32_t mask_if(bool condition) { return 0u - uint32_t(condition); }

// T is float or a vector of floats. How far the master is from its weight, in steps, of which there are `per_one` in 1;
// and the way back, to the sum of master_of.
template <class T>
FP16OPT_HD T steps_away(T master, T wide, T per_one) {
    return (master - wide) * per_one;  // exact
}
template <class T>
FP16OPT_HD T steps_added(T wide, T steps, T step) {
    return exact_product_plus(steps, step, wide);
}

FP16OPT_HD uint16_t split_remainder(Half, float master, float wide, uint16_t weight) {
    const uint32_t magnitude = bit_cast<uint32_t>(master) & 0x7fffffffu;
    const uint32_t exponent = half_exponent(weight);
    const uint32_t finite = mask_if(exponent < 31u);
    const float steps_in_one = bit_cast<float>((168u - exponent) << 23);
    const float away = bit_cast<float>(bit_cast<uint32_t>(steps_away(master, wide, steps_in_one)) & finite);
    const float whole = (away + kRounder) - kRounder;
    const float low = whole < -kMostSteps ? -kMostSteps : whole;
    const float steps = low > kMostSteps ? kMostSteps : low;
    const uint32_t infinite = mask_if(magnitude == 0x7f800000u), nan = mask_if(magnitude > 0x7f800000u);
    const uint32_t beyond = (((magnitude - kCoarseFrom) >> kCoarseShift) | infinite) & ~nan;
    return uint16_t((uint32_t(int32_t(steps)) & finite) | (beyond & ~finite));
}

FP16OPT_HD float join(Half, float wide, uint16_t weight, uint16_t remainder) {
    const uint32_t code = remainder, sign = (uint32_t(weight) & 0x8000u) << 16;
    const float step = bit_cast<float>((half_exponent(weight) + 86u) << 23);
    // An infinite or nan weight stays what it is.
    const uint32_t near = bit_cast<uint32_t>(master_of(steps_added(wide, float(int32_t(int16_t(remainder))), step), wide));
    const uint32_t beyond = sign | (kCoarseFrom + (code << kCoarseShift));
    const uint32_t coarse = mask_if((uint32_t(weight) & 0x7fffu) == 0x7c00u) & mask_if(code != kCoarseInfinity);
    return bit_cast<float>((beyond & coarse) | (near & ~coarse));
}

FP16OPT_END
