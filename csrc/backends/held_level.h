// What one SIMD level offers for gradients that are held in codes of 8 bits: each on one chunk.
#pragma once

#include "cpu_level.h"

namespace fp16opt {

// `index`: of the first element; `scales`: of its block. A chunk begins with a block.
struct HeldLevel {
    void (*encode)(DType from, const void* grad, void* codes, float* scales, uint32_t index, int64_t n);
    void (*decode)(DType to, const void* codes, const float* scales, void* out, int64_t n);
};

}  // namespace fp16opt
