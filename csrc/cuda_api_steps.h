// The one-pass steps and split masters in the memory of a GPU, free of Python and torch like cuda_api.h.
#pragma once

#include "cuda_api.h"
#include "launch/cuda_numbers.h"

namespace fp16opt {

// All addresses are of the GPU's memory. The table's lists are grads, masters, those of the state and, with `has_models`,
// models; its flags tell whose momentum buffer holds nothing yet.
struct CudaStep {
    const float *inv_scale, *coefficient;
    const float* found_inf;  // where it is not 0 nothing is written; null: the step is decided
    const Member* members;   // by entry of the table
    const void* groups;      // AdamGroup, SgdGroup or LionGroup
    bool has_models;
    int32_t* overflow;  // by row, for tensors with a model: what cuda_cast writes
    int64_t n;
};

// The state's lists: exp_avg, exp_avg_sq and, with `amsgrad`, max_exp_avg_sq.
void cuda_adam(const Launch& launch, const CudaStep& step, bool amsgrad);
// The state's list: momentum_buffer, with `has_momentum`.
void cuda_sgd(const Launch& launch, const CudaStep& step, bool has_momentum);
// The state's list: exp_avg.
void cuda_lion(const Launch& launch, const CudaStep& step);

// The table's lists are masters, models and remainders.
void cuda_split(const Launch& launch, int32_t* overflow, int64_t n);
// The table's lists are models, remainders and outs.
void cuda_join(const Launch& launch);
// The table's lists are models and remainders. Remainders are made anew in tensors where a digest of `now` is not that
// of `then`.
void cuda_renew(const Launch& launch, const int64_t* now, const int64_t* then, int32_t* taken, int64_t n);

}  // namespace fp16opt
