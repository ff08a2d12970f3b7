// One element of an Adam or AdamW step: torch's formulas, each operation rounded.
#pragma once

#include "elementary.h"
#include "options.h"
#include "scale.h"
#include "unscale.h"

FP16OPT_BEGIN

// The numbers of a step as T, which is float or a vector of floats.
template <class T>
struct AdamTerms {
    T inv_scale, coefficient, decay, l2, weight, rest, beta2, square, step_size, root, inverse, eps;
    bool adds_l2;  // adding 0 * p is not nothing: it turns -0 into 0 and infinities into nan
    bool near;     // which of the two lerp formulas torch takes

    template <class Splat>
    FP16OPT_HD AdamTerms(const GradFactors& g, const AdamScalars& s, Splat splat)
        : inv_scale(splat(g.inv_scale)), coefficient(splat(g.coefficient)), decay(splat(s.decay)), l2(splat(s.l2)),
          weight(splat(s.weight)), rest(splat(1.0f - s.weight)), beta2(splat(s.beta2)), square(splat(s.square)),
          step_size(splat(s.step_size)), root(splat(s.root)), inverse(splat(1.0f / s.root)), eps(splat(s.eps)), adds_l2(s.l2 != 0.0f),
          near(s.weight < 0.5f) {}
};

// `grad` as it is stored, widened; `p` decays, `m` and `v` are updated.
template <class T>
FP16OPT_HD void adam_moments(const AdamTerms<T>& s, T grad, T& p, T& m, T& v) {
    T g = scale(unscale(grad, s.inv_scale), s.coefficient);
    if (s.adds_l2) g = g + p * s.l2;
    p = p * s.decay;
    m = s.near ? m + s.weight * (g - m) : g - (g - m) * s.rest;
    v = v * s.beta2 + (s.square * g) * g;
}

// What the moments move `p` by; `second` is the root of v.
template <class T>
FP16OPT_HD void adam_move(const AdamTerms<T>& s, T& p, T m, T second) {
    p = p + (s.step_size * m) / (quotient(second, s.root, s.inverse) + s.eps);
}

// What the root is taken of; `largest`, unless null, is the running maximum of v.
template <class T>
FP16OPT_HD T adam_second(T v, T* largest) {
    return largest == nullptr ? v : *largest = maximum(*largest, v);
}

// The two, one after the other; `largest`, unless null, is the running maximum of v.
template <class T>
FP16OPT_HD void adam(const AdamTerms<T>& s, T grad, T& p, T& m, T& v, T* largest) {
    adam_moments(s, grad, p, m, v);
    adam_move(s, p, m, root(adam_second(v, largest)));
}

FP16OPT_END
