// Linear combination: two multiplications and one addition, each rounded.
#pragma once

#include "../core/macros.h"

FP16OPT_BEGIN

template <class T>
FP16OPT_HD T axpby(T a, T x, T b, T y) {
    return a * x + b * y;
}

FP16OPT_END
