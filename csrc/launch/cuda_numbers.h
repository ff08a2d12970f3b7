// What a step is told beyond its tensors, as its kernels read it from the GPU's memory.
#pragma once

#include "../functors/options.h"

namespace fp16opt {

// Of one entry of the table. `step` counts steps in the GPU's memory; null: `number` is the number of this one.
struct Member {
    float* step;
    float number;
    int32_t group;
};

}  // namespace fp16opt
