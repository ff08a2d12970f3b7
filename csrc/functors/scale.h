// Multiplication in place, as clipping does it.
#pragma once

#include "../core/macros.h"

FP16OPT_BEGIN

template <class T>
FP16OPT_HD T scale(T value, T factor) {
    return value * factor;
}

FP16OPT_END
