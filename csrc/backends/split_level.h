// What one SIMD level offers for split masters: each on one chunk.
#pragma once

#include "cpu_level.h"

namespace fp16opt {

struct SplitLevel {
    // Rounds masters to weights and writes what is left into remainders.
    uint32_t (*split)(DType to, const float* master, void* model, void* remainder, int64_t n);
    void (*join)(DType from, void* model, void* remainder, float* out, int64_t n);
};

}  // namespace fp16opt
