// Linear interpolation, as a running average takes a value in: a subtraction, a multiplication and an addition, each rounded.
#pragma once

#include "../core/macros.h"

FP16OPT_BEGIN

// The part `weight` of the way from one value to another. Exact at a weight of 0, so from the nearer end: with a weight of
// 1/2 or more the caller goes the rest of the way back from `to`, as torch.lerp does.
template <class T>
FP16OPT_HD T lerp(T from, T to, T weight) {
    return from + weight * (to - from);
}

FP16OPT_END
