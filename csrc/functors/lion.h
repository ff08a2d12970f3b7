// A step of Lion (Chen et al. 2023, algorithm 2): the sign of an interpolated momentum, each operation rounded.
#pragma once

#include "elementary.h"
#include "formula.h"
#include "scale.h"
#include "unscale.h"

FP16OPT_BEGIN

struct Lion : Formula {
    struct Group {
        Number lr;
        double beta1, beta2, weight_decay;
        int32_t maximize, unused;
    };

    struct Scalars {
        float decay;   // 1 - lr * weight_decay
        float beta1;
        float fresh1;  // 1 - beta1
        float beta2;
        float fresh2;  // 1 - beta2
        float step_size;  // -lr
    };

    FP16OPT_HD static Scalars scalars(const Group& g, double lr, double) {
        return {float(1.0 - lr * g.weight_decay), float(g.beta1), float(1.0 - g.beta1), float(g.beta2),
                float(1.0 - g.beta2), float(-lr)};
    }

    template <class T>
    struct Terms {
        T inv_scale, coefficient, decay, beta1, fresh1, beta2, fresh2, step_size;

        template <class Splat>
        FP16OPT_HD Terms(const GradFactors& g, const Scalars& s, Splat splat)
            : inv_scale(splat(g.inv_scale)), coefficient(splat(g.coefficient)), decay(splat(s.decay)),
              beta1(splat(s.beta1)), fresh1(splat(s.fresh1)), beta2(splat(s.beta2)), fresh2(splat(s.fresh2)),
              step_size(splat(s.step_size)) {}
    };

    // The update looks at m as it was before this step.
    template <int kPhase, bool kFirst, class T>
    FP16OPT_HD static void step(const Terms<T>& s, T grad, T& p, T& m) {
        const T g = scale(unscale(grad, s.inv_scale), s.coefficient);
        const T direction = sign(m * s.beta1 + g * s.fresh1);
        p = p * s.decay;
        p = p + direction * s.step_size;
        m = m * s.beta2 + g * s.fresh2;
    }
};

FP16OPT_END
