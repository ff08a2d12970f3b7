// Powers of a number below 1, the same bits on every machine. C libraries differ in the last place of pow, and a GPU has
// another one still, but a step's bias corrections must not: this is integer arithmetic.
#pragma once

#include "../core/macros.h"

FP16OPT_BEGIN

// A number from 0 up to 1, as a multiple of 2^-128.
struct Fraction {
    uint64_t high, low;
};

// The upper half of the product, which is exact.
FP16OPT_HD uint64_t upper_product(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
    return __umul64hi(a, b);
#else
    const uint64_t a1 = a >> 32, a0 = a & 0xffffffffull, b1 = b >> 32, b0 = b & 0xffffffffull;
    const uint64_t middle = a1 * b0 + ((a0 * b0) >> 32), other = a0 * b1 + (middle & 0xffffffffull);
    return a1 * b1 + (middle >> 32) + (other >> 32);
#endif
}

// At most 3 * 2^-128 too small.
FP16OPT_HD Fraction product(const Fraction& a, const Fraction& b) {
    const uint64_t first = upper_product(a.high, b.low), second = upper_product(a.low, b.high), third = a.high * b.high;
    const uint64_t sum = first + second, low = sum + third;
    return {upper_product(a.high, b.high) + uint64_t(sum < first) + uint64_t(low < third), low};
}

// `value` is at least 0 and less than 1; what is below 2^-128 is dropped.
FP16OPT_HD Fraction fraction_of(double value) {
    const uint64_t bits = bit_cast<uint64_t>(value);
    const int exponent = int(bits >> 52), right = 1022 - exponent;  // 0 where the value is 0.5 or more
    if (exponent == 0 || right >= 128) return {0, 0};
    const uint64_t digits = ((bits & 0xfffffffffffffull) | 0x10000000000000ull) << 11;
    if (right == 0) return {digits, 0};
    if (right < 64) return {digits >> right, digits << (64 - right)};
    return {0, digits >> (right - 64)};
}

// Rounded to nearest, ties to even.
FP16OPT_HD double as_double(const Fraction& f) {
    if ((f.high | f.low) == 0) return 0.0;
    uint64_t high = f.high, low = f.low;
    int left = 0;
    if (high == 0) {
        high = low;
        low = 0;
        left = 64;
    }
    while (high >> 63 == 0) {
        high = high << 1 | low >> 63;
        low <<= 1;
        ++left;
    }
    const uint64_t digits = high >> 11, rest = high & 0x7ffu;
    const bool up = rest > 0x400u || (rest == 0x400u && (low != 0 || (digits & 1u) != 0));
    return double(digits + uint64_t(up)) * bit_cast<double>(uint64_t(1023 - 53 - left) << 52);  // exact
}

// base^count for 0 <= base < 1, within 2^-100 before it is rounded. `count` is a number of steps: a fraction is dropped.
FP16OPT_HD double power(double base, double count) {
    uint64_t left = count >= 1.0 ? count < 9e18 ? uint64_t(count) : uint64_t(9e18) : 0u;
    if (left == 0) return 1.0;
    Fraction square = fraction_of(base), result = square;
    for (bool begun = false;; square = product(square, square)) {
        if ((left & 1u) != 0) {
            result = begun ? product(result, square) : square;
            begun = true;
        }
        left >>= 1;
        if (left == 0) return as_double(result);
    }
}

FP16OPT_END
