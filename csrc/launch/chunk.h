// A chunk: the unit of parallel work and of the fixed summation order on every backend.
#pragma once

#include <cstdint>

namespace fp16opt {

constexpr int64_t kChunk = 65536;  // elements

struct Chunk {
    int64_t start;   // first element within its tensor
    int32_t tensor;  // place in the lists
    int32_t numel;   // 1 .. kChunk
};

}  // namespace fp16opt
