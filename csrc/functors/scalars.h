// The numbers of a step, from a param_group's: in double, each rounded to float32 once. Powers (power.h) come from the
// caller.
#pragma once

#include "../core/macros.h"
#include "options.h"

FP16OPT_BEGIN

// `power1`, `power2`: beta1^t and beta2^t at the step t that is being taken, from 1. `root2`: sqrt(1 - power2).
FP16OPT_HD AdamScalars adam_scalars(double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled,
                                    double power1, double root2) {
    AdamScalars s;
    s.decay = decoupled ? float(1.0 - lr * weight_decay) : 1.0f;
    s.l2 = decoupled ? 0.0f : float(weight_decay);
    s.weight = float(1.0 - beta1);
    s.beta2 = float(beta2);
    s.square = float(1.0 - beta2);
    s.step_size = float(-(lr / (1.0 - power1)));
    s.root = float(root2);
    s.eps = float(eps);
    return s;
}

FP16OPT_HD SgdScalars sgd_scalars(double lr, double momentum, double dampening, double weight_decay, bool nesterov,
                                  bool first) {
    return {float(weight_decay), float(momentum), float(1.0 - dampening), float(-lr), nesterov ? 1 : 0, first ? 1 : 0};
}

FP16OPT_HD LionScalars lion_scalars(double lr, double beta1, double beta2, double weight_decay) {
    return {float(1.0 - lr * weight_decay), float(beta1), float(1.0 - beta1), float(beta2), float(1.0 - beta2), float(-lr)};
}

FP16OPT_END
