// The one-pass steps over lists of tensors, free of Python and torch like api.h.
#pragma once

#include "api.h"

namespace fp16opt {

// Of one param_group, in double as torch.optim holds them.
struct AdamOptions {
    double lr, beta1, beta2, eps, weight_decay;
    bool decoupled;  // AdamW's weight decay
    bool maximize;
};
struct SgdOptions {
    double lr, momentum, dampening, weight_decay;
    bool nesterov, maximize;
};

struct LionOptions {
    double lr, beta1, beta2, weight_decay;
    bool maximize;
};

// The lists of a step. The table's lists are grads, masters, those of `state` and, where it has them, `models`.
struct StepLists {
    const Table& table;
    const Pointers& grads;
    const Pointers& masters;
    std::vector<const Pointers*> state;  // Adam: exp_avg, exp_avg_sq, perhaps max_exp_avg_sq. SGD: perhaps momentum_buffer.
                                         // Lion: exp_avg
    const Pointers* models;              // nullptr: parameters that are their own masters
    std::vector<int32_t> group_of;       // by place
    // By row of the table, written for tensors with a model: what `cast` writes.
    int32_t* overflow;
    uint32_t number = 0;  // of this step, by which codes and remainders of 8 bits are rounded
};

// `steps`: by place, the float32 number of steps done, which is counted up.
void adam(const StepLists& lists, const Pointers& steps, const std::vector<AdamOptions>& groups, float inv_scale,
          float coefficient, int threads);

// `first`: by place, whether the momentum buffer holds nothing yet.
void sgd(const StepLists& lists, const std::vector<uint8_t>& first, const std::vector<SgdOptions>& groups, float inv_scale,
         float coefficient, int threads);

// The same with 8-bit state: codes (functors/ratio8.h). `scales`: by place, one float32 for each block of 128 elements.
// `limits`: by group, the largest |m| / sqrt(v) that codes stand for.
void adam8(const StepLists& lists, const Pointers& scales, const Pointers& steps, const std::vector<AdamOptions>& groups,
           const std::vector<float>& limits, float inv_scale, float coefficient, int threads);
void sgd8(const StepLists& lists, const Pointers& scales, const std::vector<uint8_t>& first,
          const std::vector<SgdOptions>& groups, float inv_scale, float coefficient, int threads);
void lion(const StepLists& lists, const std::vector<LionOptions>& groups, float inv_scale, float coefficient, int threads);

}  // namespace fp16opt
