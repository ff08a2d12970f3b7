// One element of an SGD step: torch's formulas, each operation rounded.
#pragma once

#include "options.h"
#include "scale.h"
#include "unscale.h"
#include "../core/macros.h"

FP16OPT_BEGIN

// The numbers of a step as T, which is float or a vector of floats.
template <class T>
struct SgdTerms {
    T inv_scale, coefficient, l2, momentum, fresh, step_size;
    bool adds_l2, nesterov;

    template <class Splat>
    FP16OPT_HD SgdTerms(const GradFactors& g, const SgdScalars& s, Splat splat)
        : inv_scale(splat(g.inv_scale)), coefficient(splat(g.coefficient)), l2(splat(s.l2)), momentum(splat(s.momentum)),
          fresh(splat(s.fresh)), step_size(splat(s.step_size)), adds_l2(s.l2 != 0.0f), nesterov(s.nesterov != 0) {}
};

// `grad` as it is stored, widened; `p` and `buffer` are updated. A null `buffer` is a step without momentum; kFirst says
// that it holds nothing yet.
template <bool kFirst, class T>
FP16OPT_HD void sgd(const SgdTerms<T>& s, T grad, T& p, T* buffer) {
    T g = scale(unscale(grad, s.inv_scale), s.coefficient);
    if (s.adds_l2) g = g + p * s.l2;
    if (buffer != nullptr) {
        *buffer = kFirst ? g : *buffer * s.momentum + g * s.fresh;
        g = s.nesterov ? g + *buffer * s.momentum : *buffer;
    }
    p = p + g * s.step_size;
}

FP16OPT_END
