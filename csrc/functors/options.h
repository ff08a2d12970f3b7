// What a step is told beyond its tensors, as plain data that the host fills in and any backend reads. Every number was
// computed in double and rounded to float32 once.
#pragma once

#include <cstdint>

namespace fp16opt {

// A gradient as it is stored becomes (gradient * inv_scale) * coefficient: two roundings, and the bits that one reads in
// `.grad`. `coefficient` is what clipping multiplies by; its sign is negative to maximize, which rounds nothing.
struct GradFactors {
    float inv_scale;
    float coefficient;
};

// Of one tensor at one step.
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

struct SgdScalars {
    float l2;        // weight_decay
    float momentum;
    float fresh;     // 1 - dampening
    float step_size;  // -lr
    int32_t nesterov;
    int32_t first;   // the buffer holds nothing yet: it becomes the gradient, undampened
};

struct LionScalars {
    float decay;   // 1 - lr * weight_decay
    float beta1;
    float fresh1;  // 1 - beta1
    float beta2;
    float fresh2;  // 1 - beta2
    float step_size;  // -lr
};

}  // namespace fp16opt
