// A step of Adam or AdamW: torch's formulas, each operation rounded.
#pragma once

#include "elementary.h"
#include "formula.h"
#include "power.h"
#include "scale.h"
#include "unscale.h"

FP16OPT_BEGIN

struct AdamGroup {
    Number lr;
    double beta1, beta2, eps, weight_decay;
    int32_t decoupled, maximize;  // decoupled: AdamW's weight decay
};
struct Adam8Group : AdamGroup {
    float limit;  // of |m| / sqrt(v)
    int32_t unused;
};

struct AdamScalars {
    float decay;      // 1 - lr * weight_decay where that is decoupled, else 1
    float l2;         // weight_decay where it is added to the gradient, else 0
    float weight;     // 1 - beta1
    float beta2;
    float square;     // 1 - beta2
    float step_size;  // -lr / (1 - beta1^t)
    float root;       // sqrt(1 - beta2^t)
    float eps;
};

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

// `g` is the gradient, scaled and clipped; `p` decays, `m` and `v` are updated. kNear: `near` is known to be true.
template <bool kNear = false, class T>
FP16OPT_HD void adam_moments_of(const AdamTerms<T>& s, T g, T& p, T& m, T& v) {
    p = p * s.decay;
    m = kNear || s.near ? m + s.weight * (g - m) : g - (g - m) * s.rest;
    v = v * s.beta2 + (s.square * g) * g;
}

// `grad` as it is stored, widened.
template <class T>
FP16OPT_HD void adam_moments(const AdamTerms<T>& s, T grad, T& p, T& m, T& v) {
    T g = scale(unscale(grad, s.inv_scale), s.coefficient);
    if (s.adds_l2) g = g + p * s.l2;
    adam_moments_of(s, g, p, m, v);
}

// What the moments move `p` by; `second` is the root of v.
template <class T>
FP16OPT_HD void adam_move(const AdamTerms<T>& s, T& p, T m, T second) {
    p = p + (s.step_size * m) / (quotient(second, s.root, s.inverse) + s.eps);
}

// What the root is taken of: v, or the running maximum of it.
template <class T>
FP16OPT_HD T adam_second(T v) {
    return v;
}
template <class T>
FP16OPT_HD T adam_second(T v, T& largest) {
    return largest = maximum(largest, v);
}

// The state: exp_avg, exp_avg_sq and, for amsgrad, max_exp_avg_sq.
struct Adam : Formula {
    static constexpr int least_states = 2, most_states = 3;
    static constexpr bool counts = true;
    static constexpr int phases = 2;  // what divides waits long for the root, and a chain of both finds too little else to do
    using Group = AdamGroup;
    using Scalars = AdamScalars;
    template <class T>
    using Terms = AdamTerms<T>;

    FP16OPT_HD static Scalars scalars(const Group& g, double lr, double count) {
        const bool decoupled = g.decoupled != 0;
        Scalars s;
        s.decay = decoupled ? float(1.0 - lr * g.weight_decay) : 1.0f;
        s.l2 = decoupled ? 0.0f : float(g.weight_decay);
        s.weight = float(1.0 - g.beta1);
        s.beta2 = float(g.beta2);
        s.square = float(1.0 - g.beta2);
        s.step_size = float(-(lr / (1.0 - power(g.beta1, count))));
        s.root = float(square_root(1.0 - power(g.beta2, count)));
        s.eps = float(g.eps);
        return s;
    }

    template <int kPhase, bool kFirst, class T, class... Largest>
    FP16OPT_HD static void step(const AdamTerms<T>& s, T& g, T& p, T& m, T& v, Largest&... largest) {
        if constexpr (kPhase == 0) {
            adam_moments(s, g, p, m, v);
            g = root(adam_second(v, largest...));
        } else {
            adam_move(s, p, m, g);
        }
    }
};

FP16OPT_END
