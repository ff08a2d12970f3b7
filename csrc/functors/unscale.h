// The gradient of the unscaled loss, from the gradient of the scaled one.
#pragma once

#include "../core/macros.h"

FP16OPT_BEGIN

// T is float, double, or a vector of floats.
template <class T>
FP16OPT_HD T unscale(T grad, T inv_scale) {
    return grad * inv_scale;
}

FP16OPT_END
