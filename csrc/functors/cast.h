// Between float32 and the type in which an element is stored.
#pragma once

#include "../core/bfloat16.h"
#include "../core/half.h"

FP16OPT_BEGIN

// Storage types. Tags and not arithmetic types: all arithmetic is in float32 or float64.
struct Half {
    uint16_t bits;
};
struct BFloat16 {
    uint16_t bits;
};
template <class T>
constexpr bool kIsHalf = false;
template <>
constexpr bool kIsHalf<Half> = true;

FP16OPT_HD float widen(Half value) { return half_to_float(value.bits); }
FP16OPT_HD float widen(BFloat16 value) { return bfloat16_to_float(value.bits); }
FP16OPT_HD float widen(float value) { return value; }

template <class To>
FP16OPT_HD To narrow(float value);
template <>
FP16OPT_HD Half narrow<Half>(float value) {
    return Half{float_to_half(value)};
}
template <>
FP16OPT_HD BFloat16 narrow<BFloat16>(float value) {
    return BFloat16{float_to_bfloat16(value)};
}
template <>
FP16OPT_HD float narrow<float>(float value) {
    return value;
}

// The smallest float32 magnitude, as bits, that is rounded to infinity.
template <class To>
FP16OPT_HD uint32_t first_infinite();
template <>
FP16OPT_HD uint32_t first_infinite<Half>() {
    return 0x477ff000u;  // 65520
}
template <>
FP16OPT_HD uint32_t first_infinite<BFloat16>() {
    return 0x7f7f8000u;
}

FP16OPT_END
