// What a step is told beyond its tensors, as its kernels read it from the GPU's memory.
#pragma once

#include "../core/macros.h"

namespace fp16opt {

// A number that the host knows, or that lies in the GPU's memory as float32 or float64.
struct Number {
    double value;
    const void* at;  // null: `value` is the number
    int64_t is_wide;
};

// Of one param_group.
struct AdamGroup {
    Number lr;
    double beta1, beta2, eps, weight_decay;
    int32_t decoupled, maximize;
};
struct Adam8Group {
    Number lr;
    double beta1, beta2, eps, weight_decay;
    int32_t decoupled, maximize;
    float limit;  // of |m| / sqrt(v)
    int32_t unused;
};
struct SgdGroup {
    Number lr;
    double momentum, dampening, weight_decay;
    int32_t nesterov, maximize;
};
struct LionGroup {
    Number lr;
    double beta1, beta2, weight_decay;
    int32_t maximize, unused;
};

// Of one entry of the table. `step` counts steps in the GPU's memory; null: `number` is the number of this one.
struct Member {
    float* step;
    float number;
    int32_t group;
};

}  // namespace fp16opt
