// Adding an unscaled gradient to those of earlier backward passes.
#pragma once

#include "../core/macros.h"

FP16OPT_BEGIN

template <class T>
FP16OPT_HD T accumulate(T sum, T unscaled) {
    return sum + unscaled;
}

FP16OPT_END
