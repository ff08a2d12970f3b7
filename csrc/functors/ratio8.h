// Optimizer state in 8 bits: codes of single elements, and one float32 scale for each block of consecutive ones.
//
// Adam ("ratio8"): r = sqrt(v) is kept as the square root of its share of the block's largest, in 8 bits; m as m / r, a sign
// and 7 bits, which needs no scale: |m| / r never exceeds a limit that follows from the betas. SGD ("block8"): the momentum is
// kept as its share of the block's largest, in the code of m. Codes are rounded with a dither that is a function of index and
// step: it carries what is less than a code over many steps, and rounding to nearest would drop it each time.
//
// Below T is float or a vector of floats, W uint32_t or a vector of as many of them.
#pragma once

#include "elementary.h"

FP16OPT_BEGIN

constexpr int kStateBlock = 128;            // consecutive elements in memory order, of one tensor
constexpr float kLargestRoot = 0x1p62f;     // of v that is kept: its square is finite
constexpr float kLeastScale = 0x1p-46f;     // blocks below it are zero: their squares would leave the normal range
constexpr float kLargestMomentum = 0x1p126f;
constexpr float kLeastMomentum = 0x1p-100f;
constexpr float kLargestMoment = 0x1.fffffep127f;  // the code of infinity is its code too
constexpr float kShareUnit = 1.0f / 255.0f;
constexpr float kShares = 0x1.fe0004p7f;    // 255, and so much more that the largest is never rounded down
constexpr float kRatioUnit = 1.0f / 247.0f;
constexpr float kRatios = 247.0f;           // the code 127 stands for 248 - 1
constexpr uint32_t kOneBits = 0x3f800000u;
constexpr int kRatioShift = 19;             // 4 bits of mantissa and 3 of exponent stay
constexpr uint32_t kNoSteps = kOneBits >> kRatioShift;

// What rounds an element up or down: the same on every machine, and for neighbours and steps in a row spread evenly.
constexpr uint32_t kIndexStride = 0x9E3779B1u, kStepStride = 0x85EBCA77u;
FP16OPT_HD uint32_t dither_at(uint64_t index, uint32_t step) { return uint32_t(index) * kIndexStride + step * kStepStride; }
template <class W>
FP16OPT_HD W ratio_dither(W dither) {
    return dither & 0x7ffffu;
}

// -- codes to numbers ------------------------------------------------------------------------------------------------

// sqrt(v) of its code, as a number.
template <class T>
FP16OPT_HD T root_of_number(T code, T scale) {
    const T share = code * kShareUnit;
    return scale * (share * share);
}
template <class T, class W>
FP16OPT_HD T root_of_code(W code, T scale) {
    return root_of_number(to_floats(code), scale);
}

// m of its code, which is in the upper byte of 32 bits: `unit` is limit * kRatioUnit, `per` what it is a share of.
template <class T, class W>
FP16OPT_HD T signed_of_code(W code, T per, T unit) {
    const T wide = bit_cast<T>((magnitude_of_word(code) >> (24 - kRatioShift)) + kOneBits);
    return times_one_less(wide, with_sign_of(unit, code)) * per;
}

// -- numbers to codes ------------------------------------------------------------------------------------------------

template <class T>
FP16OPT_HD T root_to_keep(T root_of_second) {
    return smaller(root_of_second, kLargestRoot);
}

// m, or SGD's momentum. A nan counts as a positive number, as it does in the two that look for a block's largest: its sign differs
// from processor to processor, and would be the code's.
template <class T>
FP16OPT_HD T moment_to_keep(T m) {
    return smaller(m, kLargestMoment);
}

template <class T, class W>
FP16OPT_HD T magnitude_of(T value, W) {
    return bit_cast<T>(bit_cast<W>(value) & 0x7fffffffu);
}

// A share of some number, from 0 to the limit, in steps of the code of which 0 is kNoSteps; `units` is 247 / limit.
template <class T, class W>
FP16OPT_HD W ratio_steps(T ratio, T units, W dither) {
    const T wide = ratio * units + 1.0f;
    return (bit_cast<W>(wide) + dither) >> kRatioShift;
}
// The code of a value that is so many steps. In the low byte.
template <class T, class W>
FP16OPT_HD W signed_code(W steps, T value) {
    return with_sign_of(smaller_word(steps - kNoSteps, 127u), bit_cast<W>(value));
}

// What the code of sqrt(v) is truncated from; `share` is the root of its share of the scale.
template <class T, class W>
FP16OPT_HD T root_shares(T share, W dither) {
    return exact_product_plus(to_floats(dither >> 16), 0x1p-16f, share * kShares);
}
// The code of `kept`. What is not zero stays so.
template <class T, class W>
FP16OPT_HD W root_code(W shares, T kept) {
    return larger_word(smaller_word(shares, 255u), smaller_word(bit_cast<W>(kept), 1u));
}

FP16OPT_END
