// A float32 master as the 16-bit weight of the model and an 8-bit remainder.
//
// float16: the weight is rounded to nearest, ties to even, and the remainder counts 256ths of the weight's last place, rounded
// to nearest: the master is kept within 2^-9 of that place, or 2^-8 where the count is 128 and is clamped to 127. From 65520 on the
// weight is infinite and the remainder holds the upper bits of the magnitude. bfloat16: the master's upper 24 bits, of which
// the weight is the upper half rounded to nearest, ties away from zero; what is below them is rounded up or down by a dither,
// a function of index and step, because updates that are less than half of the last place would otherwise be lost each time.
#pragma once

#include "split.h"

FP16OPT_BEGIN

constexpr int kCoarseShift24 = 22;
constexpr float kMostSteps24 = 127.0f;
// By steps the golden ratio, of which any few steps in a row are spread most evenly: a master is never far from its place.
constexpr uint32_t kMasterIndexStride = 0x85EBCA77u, kMasterStepStride = 0x9E3779B1u;

FP16OPT_HD uint32_t master_dither_at(uint64_t index, uint32_t step) {
    return uint32_t(index) * kMasterIndexStride + step * kMasterStepStride;
}
// What rounds a master of bfloat16 to nearest, ties to even: outside of steps.
FP16OPT_HD uint32_t nearest_dither(float master) {
    return (0x7fu + ((bit_cast<uint32_t>(master) >> 8) & 1u)) << 24;
}
FP16OPT_HD uint8_t plain_remainder24(bool half, uint16_t weight) {
    return half && (weight & 0x7fffu) == 0x7c00u ? uint8_t(0xff) : uint8_t(0);
}

// -- bfloat16 --------------------------------------------------------------------------------------------------------

// The master's bits, of which the lower 8 are to be dropped; W is uint32_t or a vector of as many.
template <class W>
FP16OPT_HD W dithered_bits(W master, W dither) {
    return master + (dither >> 24);
}
FP16OPT_HD uint32_t bits24(float master, uint32_t dither) {
    const uint32_t bits = bit_cast<uint32_t>(master), rounded = dithered_bits(bits, dither);
    if (is_nan_bits(bits)) return bits | 0x00400000u;
    const bool leaves = (bits & 0x7fffffffu) < 0x7f800000u && (rounded & 0x7fffffffu) >= 0x7f800000u;
    return leaves ? bits : rounded;
}
struct Parts24 {
    uint16_t weight;
    uint8_t remainder;
};
FP16OPT_HD Parts24 split24(BFloat16, float master, uint32_t dither) {
    const uint32_t bits = bits24(master, dither);
    if (is_nan_bits(bits)) return {uint16_t(bits >> 16), 0};
    return {uint16_t((bits + 0x8000u) >> 16), uint8_t(bits >> 8)};
}
FP16OPT_HD float join24(BFloat16, uint16_t weight, uint8_t remainder) {
    const uint32_t wide = uint32_t(weight) << 16;
    return master_of(bit_cast<float>(wide + (uint32_t(int32_t(int8_t(remainder))) << 8)), bit_cast<float>(wide));
}

// -- float16 ---------------------------------------------------------------------------------------------------------

FP16OPT_HD Parts24 split24(Half, float master, uint32_t) {
    const uint16_t weight = float_to_half(master);
    const uint32_t magnitude = bit_cast<uint32_t>(master) & 0x7fffffffu, exponent = half_exponent(weight);
    if (exponent == 31u) {
        const uint32_t beyond = magnitude == 0x7f800000u ? 0xffu : (magnitude - kCoarseFrom) >> kCoarseShift24;
        return {weight, uint8_t(magnitude > 0x7f800000u ? 0u : beyond)};
    }
    const float away = steps_away(master, half_to_float(weight), bit_cast<float>((160u - exponent) << 23));
    const float whole = (away + kRounder) - kRounder;
    const float low = whole < -kMostSteps24 ? -kMostSteps24 : whole;
    return {weight, uint8_t(int8_t(low > kMostSteps24 ? kMostSteps24 : low))};
}
FP16OPT_HD float join24(Half, uint16_t weight, uint8_t remainder) {
    if ((uint32_t(weight) & 0x7fffu) == 0x7c00u && remainder != 0xffu) {
        const uint32_t sign = (uint32_t(weight) & 0x8000u) << 16;
        return bit_cast<float>(sign | (kCoarseFrom + (uint32_t(remainder) << kCoarseShift24)));
    }
    const float step = bit_cast<float>((half_exponent(weight) + 94u) << 23);
    const float wide = half_to_float(weight);
    return master_of(steps_added(wide, float(int8_t(remainder)), step), wide);
}

FP16OPT_END
