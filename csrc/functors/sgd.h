// A step of SGD: torch's formulas, each operation rounded.
#pragma once

#include "formula.h"
#include "scale.h"
#include "unscale.h"

FP16OPT_BEGIN

struct SgdGroup {
    Number lr;
    double momentum, dampening, weight_decay;
    int32_t nesterov, maximize;
};

struct SgdScalars {
    float l2;  // weight_decay
    float momentum;
    float fresh;      // 1 - dampening
    float step_size;  // -lr
    int32_t nesterov;
};

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

// `g` is the gradient, scaled, clipped and with L2; `p` and `buffer` are updated. A null `buffer` is a step without momentum;
// kFirst says that it holds nothing yet.
template <bool kFirst, class T>
FP16OPT_HD void sgd_of(const SgdTerms<T>& s, T g, T& p, T* buffer) {
    if (buffer != nullptr) {
        *buffer = kFirst ? g : *buffer * s.momentum + g * s.fresh;
        g = s.nesterov ? g + *buffer * s.momentum : *buffer;
    }
    p = p + g * s.step_size;
}

// `grad` as it is stored, widened.
template <bool kFirst, class T>
FP16OPT_HD void sgd(const SgdTerms<T>& s, T grad, T& p, T* buffer) {
    T g = scale(unscale(grad, s.inv_scale), s.coefficient);
    if (s.adds_l2) g = g + p * s.l2;
    sgd_of<kFirst>(s, g, p, buffer);
}

// The state: nothing, or momentum_buffer.
struct Sgd : Formula {
    static constexpr int least_states = 0;
    static constexpr bool fills_first = true;
    using Group = SgdGroup;
    using Scalars = SgdScalars;
    template <class T>
    using Terms = SgdTerms<T>;

    FP16OPT_HD static Scalars scalars(const Group& g, double lr, double) {
        return {float(g.weight_decay), float(g.momentum), float(1.0 - g.dampening), float(-lr), g.nesterov};
    }

    template <int kPhase, bool kFirst, class T>
    FP16OPT_HD static void step(const SgdTerms<T>& s, T grad, T& p) {
        sgd<kFirst, T>(s, grad, p, nullptr);
    }
    template <int kPhase, bool kFirst, class T>
    FP16OPT_HD static void step(const SgdTerms<T>& s, T grad, T& p, T& buffer) {
        sgd<kFirst>(s, grad, p, &buffer);
    }
};

FP16OPT_END
