// One element of a Lion step (Chen et al. 2023, algorithm 2): the sign of an interpolated momentum, each operation rounded.
#pragma once

#include "elementary.h"
#include "options.h"
#include "scale.h"
#include "unscale.h"

FP16OPT_BEGIN

// The numbers of a step as T, which is float or a vector of floats.
template <class T>
struct LionTerms {
    T inv_scale, coefficient, decay, beta1, fresh1, beta2, fresh2, step_size;

    template <class Splat>
    FP16OPT_HD LionTerms(const GradFactors& g, const LionScalars& s, Splat splat)
        : inv_scale(splat(g.inv_scale)), coefficient(splat(g.coefficient)), decay(splat(s.decay)), beta1(splat(s.beta1)),
          fresh1(splat(s.fresh1)), beta2(splat(s.beta2)), fresh2(splat(s.fresh2)), step_size(splat(s.step_size)) {}
};

// `grad` as it is stored, widened; `p` and `m` are updated. The update looks at m as it was before this step.
template <class T>
FP16OPT_HD void lion(const LionTerms<T>& s, T grad, T& p, T& m) {
    const T g = scale(unscale(grad, s.inv_scale), s.coefficient);
    const T direction = sign(m * s.beta1 + g * s.fresh1);
    p = p * s.decay;
    p = p + direction * s.step_size;
    m = m * s.beta2 + g * s.fresh2;
}

FP16OPT_END
