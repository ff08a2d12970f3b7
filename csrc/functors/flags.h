// What is remarkable about one element, as bits that are ORed over a tensor.
#pragma once

#include "../core/macros.h"

FP16OPT_BEGIN

enum : uint32_t { kInf = 1, kNan = 2 };            // of an unscaled gradient
enum : uint32_t { kTooLarge = 1, kNotFinite = 2 };  // of a master that is rounded to 16 bits

FP16OPT_HD bool is_nan(double x) { return x != x; }
FP16OPT_HD bool is_inf(double x) { return x == x && x - x != x - x; }
FP16OPT_HD bool is_finite(double x) { return x - x == 0.0; }

// Bits of a gradient that is written.
FP16OPT_HD uint32_t grad_flags(double unscaled) {
    return is_nan(unscaled) ? uint32_t(kNan) : is_inf(unscaled) ? uint32_t(kInf) : 0u;
}

// Bits of a gradient that is added: also where a finite sum leaves the range.
FP16OPT_HD uint32_t grad_flags(double unscaled, double before, double after) {
    return grad_flags(unscaled) | (is_inf(after) && is_finite(before) ? uint32_t(kInf) : 0u);
}

// Bits of a master; `first_infinite` is the smallest magnitude that becomes infinite in the 16-bit type.
FP16OPT_HD uint32_t cast_flags(float master, uint32_t first_infinite) {
    const uint32_t magnitude = bit_cast<uint32_t>(master) & 0x7fffffffu;
    return magnitude >= 0x7f800000u ? uint32_t(kNotFinite) : magnitude >= first_infinite ? uint32_t(kTooLarge) : 0u;
}

FP16OPT_END
