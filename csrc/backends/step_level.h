// What one SIMD level offers for the one-pass steps: each on one chunk.
#pragma once

#include "../functors/options.h"
#include "cpu_level.h"

namespace fp16opt {

// For each array of a chunk a distance in bytes.
struct Distances {
    int64_t grad, master, state[3], model;
};

// The addresses of a chunk's first elements. `model` is null for parameters that are their own masters. `state` is
// float32 but for the steps with 8-bit state.
struct StepChunk {
    DType grad_dtype, model_dtype;
    const void* grad;
    void* master;
    void* state[3];  // null from `states` on
    void* model;
    int64_t numel;
    Distances ahead;  // from what a loop reads to what it asks the cache for
    int states;
    bool split;    // `master` holds the remainders of masters that are split
    bool split24;  // they are of 8 bits, and rounded with a dither: that of the first element
    uint32_t master_dither;
    bool stream;  // write the 16-bit weights around the caches
    uint64_t* bits;   // of all of the tensor: where weights that get other bits are marked; null where they are not
    uint32_t* guard;  // of what is marked there
    int64_t place;    // of the first element in its tensor
    bool shared;      // other threads may mark others in the same words
};

// `scalars`: the formula's, as every level lays them out. `first`: whether the state holds nothing yet.
typedef uint32_t (*StepOfChunk)(const StepChunk& chunk, const GradFactors& factors, const void* scalars, bool first);

struct StepLevel {
    const StepOfChunk* steps;  // in the order of FP16OPT_FORMULAS
};

}  // namespace fp16opt
