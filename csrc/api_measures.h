// The numbers of reports, over lists of tensors.
#pragma once

#include "api.h"
#include "functors/measure.h"

namespace fp16opt {

// `numbers` has kMeasured for each row, and all of a row that takes part are overwritten.
void measure(const Table& table, const Pointers& grads, double* numbers, int64_t n, int threads);

// `before` holds the groups that are measured of each tensor, from `offsets`, by row, on; `numbers` has kCompared for each row.
void compare(const Table& table, const Pointers& masters, const Pointers& weights, const float* before,
             const int64_t* offsets, double* numbers, int64_t n, int threads);

}  // namespace fp16opt
