// What one SIMD level offers for the numbers of reports: each on one chunk.
#pragma once

#include "../functors/measure.h"
#include "cpu_level.h"

namespace fp16opt {

struct MeasureLevel {
    Numbers (*measure)(DType of, const void* grad, int64_t n);
    // `before`: the tensor's groups that are measured, one behind the other. `start`: the chunk's first element in its tensor.
    Numbers (*compare)(DType of_master, DType of_weight, const void* master, const void* weight, const float* before,
                       bool whole, int64_t start, int64_t n);
};

}  // namespace fp16opt
