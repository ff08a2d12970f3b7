// What one SIMD level offers for the one-pass steps: each on one chunk.
#pragma once

#include "../functors/options.h"
#include "cpu_level.h"

namespace fp16opt {

// The addresses of a chunk's first elements. `model` is null for parameters that are their own masters. `state` is Adam's
// exp_avg, exp_avg_sq and, with amsgrad, their largest; SGD's momentum buffer, or nothing; Lion's exp_avg. It is float32 but
// for the steps with 8-bit state.
struct StepChunk {
    DType grad_dtype, model_dtype;
    const void* grad;
    void* master;
    void* state[3];
    void* model;
    int64_t numel;
    bool split;    // `master` holds the remainders of masters that are split
    bool split24;  // they are of 8 bits, and rounded with a dither: that of the first element
    uint32_t master_dither;
    bool stream;  // write the 16-bit weights around the caches
};

struct StepLevel {
    uint32_t (*adam)(const StepChunk& chunk, const GradFactors& factors, const AdamScalars& scalars);
    uint32_t (*sgd)(const StepChunk& chunk, const GradFactors& factors, const SgdScalars& scalars);
    uint32_t (*lion)(const StepChunk& chunk, const GradFactors& factors, const LionScalars& scalars);
};

}  // namespace fp16opt
