// The gradient of the unscaled loss, from the gradient of the scaled one.
#pragma once

#include "../core/macros.h"

FP16OPT_BEGIN

// T is float, double, or a vector of floats.
template <class T>
FP16OPT_HD T unscale(T grad, T inv_scale) {
    return grad * inv_scale;
}

// Whether the product of a finite FP16 number, which is less than 2^16, may leave the range of float32.
FP16OPT_HD bool may_overflow_halves(float inv_scale) { return !(-0x1p112f <= inv_scale && inv_scale <= 0x1p112f); }

FP16OPT_END
