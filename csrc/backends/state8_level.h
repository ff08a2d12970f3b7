// What one SIMD level offers for steps with 8-bit state: each on one chunk, which begins at a multiple of a block.
#pragma once

#include "step_level.h"

namespace fp16opt {

// What codes of a chunk are read with; see functors/ratio8.h.
struct State8Chunk {
    float* scales;
    float limit;      // of |m| / sqrt(v)
    uint32_t dither;  // of the first element
};

// `scalars` and `first` as in StepOfChunk.
struct State8Level {
    uint32_t (*adam)(const StepChunk& chunk, const State8Chunk& state, const GradFactors& factors, const void* scalars);
    uint32_t (*sgd)(const StepChunk& chunk, const State8Chunk& state, const GradFactors& factors, const void* scalars, bool first);
};

}  // namespace fp16opt
