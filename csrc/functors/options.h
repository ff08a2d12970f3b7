// What a step is told beyond its tensors, as plain data that the host fills in and any backend reads.
#pragma once

#include <cstdint>

namespace fp16opt {

// A gradient as it is stored becomes (gradient * inv_scale) * coefficient: two roundings, and the bits that one reads in
// `.grad`. `coefficient` is what clipping multiplies by; its sign is negative to maximize, which rounds nothing.
struct GradFactors {
    float inv_scale;
    float coefficient;
};

// A number that the host knows, or that lies in a GPU's memory as float32 or float64.
struct Number {
    double value;
    const void* at;  // null: `value` is the number
    int64_t is_wide;
};

}  // namespace fp16opt
