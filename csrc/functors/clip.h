// What gradients of a norm are multiplied by to bring it down to a limit.
#pragma once

#include "flags.h"

FP16OPT_BEGIN

// The formula and the bits of torch.nn.utils.clip_grad_norm_, which works in float32 and divides by taking a reciprocal.
// Where the norm is finite but too large for float32 the factor is taken in double.
FP16OPT_HD float clip_factor(double norm, double max_norm) {
    const float single = float(norm);
    const float factor = is_finite(double(single)) ? (1.0f / (single + 1e-6f)) * float(max_norm)
                                                   : float((1.0 / norm) * max_norm);
    return factor > 1.0f ? 1.0f : factor;  // nan stays
}

// The outcome of a clip: the norm, and what gradients are multiplied by. That is 1 where an element is not finite, and with
// `only_finite` where the norm is not. `found_inf` may be null.
FP16OPT_HD void decide_clip(double norm, const float* found_inf, bool only_finite, double max_norm, float* single, float* factor) {
    const bool stays = (found_inf != nullptr && *found_inf > 0.0f) || (only_finite && !is_finite(norm));
    *single = float(norm);
    *factor = stays ? 1.0f : clip_factor(norm, max_norm);
}

FP16OPT_END
