// What one SIMD level offers for steps with 8-bit state: each on one chunk, which begins at a multiple of a block.
#pragma once

#include "step_level.h"

namespace fp16opt {

// Of the chunk's first element on; see functors/ratio8.h. `second` is null for SGD.
struct State8Chunk {
    int8_t* first;
    uint8_t* second;
    float* scales;
    float limit;      // of |m| / sqrt(v)
    uint32_t dither;  // of the first element
};

struct State8Level {
    uint32_t (*adam)(const StepChunk& chunk, const State8Chunk& state, const GradFactors& factors, const AdamScalars& scalars);
    uint32_t (*sgd)(const StepChunk& chunk, const State8Chunk& state, const GradFactors& factors, const SgdScalars& scalars);
};

}  // namespace fp16opt
