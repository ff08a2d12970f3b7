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
constexpr float kShareUnit = 1.0f / 255.0f;
constexpr float kShares = 0x1.fe0004p7f;    // 255, and so much more that the largest is never rounded down
constexpr float kRatioUnit = 1.0f / 247.0f;
constexpr float kRatios = 247.0f;           // the code 127 stands for 248 - 1
constexpr uint32_t kOneBits = 0x3f800000u;
constexpr int kRatioShift = 19;             // 4 bits of mantissa and 3 of exponent stay

// What rounds an element up or down: the same on every machine, and for neighbours and steps in a row spread evenly.
constexpr uint32_t kIndexStride = 0x9E3779B1u, kStepStride = 0x85EBCA77u;
FP16OPT_HD uint32_t dither_at(uint64_t index, uint32_t step) { return uint32_t(index) * kIndexStride + step * kStepStride; }
template <class W>
FP16OPT_HD W ratio_dither(W dither) {
    return dither & 0x7ffffu;
}
template <class T, class W>
FP16OPT_HD T share_dither(W dither, T) {
    return to_floats(dither >> 16) * 0x1p-16f;
}

// -- codes to numbers ------------------------------------------------------------------------------------------------

// sqrt(v) of its code.
template <class T, class W>
FP16OPT_HD T root_of_code(W code, T scale) {
    const T share = to_floats(code) * kShareUnit;
    return scale * (share * share);
}

// m of its code, sign-extended to 32 bits: `unit` is limit * kRatioUnit, `per` what it is a share of.
template <class T, class W>
FP16OPT_HD T signed_of_code(W code, T per, T unit) {
    const T wide = bit_cast<T>((magnitude_of_word(code) << kRatioShift) + kOneBits);
    const T value = ((wide - 1.0f) * unit) * per;
    return bit_cast<T>(bit_cast<W>(value) | (code & 0x80000000u));
}

// -- numbers to codes ------------------------------------------------------------------------------------------------

template <class T>
FP16OPT_HD T root_to_keep(T root_of_second) {
    return smaller(root_of_second, kLargestRoot);
}

template <class T, class W>
FP16OPT_HD T magnitude_of(T value, W) {
    return bit_cast<T>(bit_cast<W>(value) & 0x7fffffffu);
}

// The code of a number that is a share of `per`; `units` is 247 / limit. In the low byte.
template <class T, class W>
FP16OPT_HD W signed_code(T value, T per, T units, W dither) {
    const W bits = bit_cast<W>(value);
    const T wide = ratio_or_zero(bit_cast<T>(bits & 0x7fffffffu), per) * units + 1.0f;
    const W code = smaller_word((bit_cast<W>(wide) + dither - kOneBits) >> kRatioShift, 127u);
    return with_sign_of(code, bits);
}

// The code of sqrt(v); `per_scale` is 1 / scale. What is not zero stays so.
template <class T, class W>
FP16OPT_HD W root_code(T kept, T per_scale, W dither) {
    const T shares = root(kept * per_scale) * kShares + share_dither(dither, kept);
    return larger_word(smaller_word(to_words(shares), 255u), smaller_word(bit_cast<W>(kept), 1u));
}

FP16OPT_END
