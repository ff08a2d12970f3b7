// The operations besides + - * / that steps need, for one float. Vectors have theirs in launch/simd.h.
#pragma once

#include "../core/macros.h"

FP16OPT_BEGIN

// Correctly rounded.
FP16OPT_HD float root(float x) {
#if defined(__CUDA_ARCH__)
    return __fsqrt_rn(x);
#else
    return __builtin_sqrtf(x);
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

FP16OPT_END
