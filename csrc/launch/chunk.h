// A chunk: the unit of parallel work and of the fixed summation order on every backend.
#pragma once

#include <cstdint>

namespace fp16opt {

constexpr int64_t kChunk = 65536;  // elements
constexpr int64_t kScaled = 128;   // elements that have one scale, where a tensor's state has 8 bits

struct Chunk {
    int64_t start;   // first element within its tensor
    int32_t tensor;  // place in the lists
    int32_t numel;   // 1 .. kChunk
    uint32_t index;  // of the first element within the whole tensor, where this one is a piece of it: its lower 32 bits
    uint32_t block;  // of the first element among the tensor's scales
};

// Where a tensor's elements lie in the whole tensor of which it is a piece: element i has there the index
// offset + i / unit * stride + i % unit. Chunks, and blocks with one scale, begin anew at each unit. A unit of 0 is all elements.
struct Piece {
    int64_t offset, unit, stride;
};

}  // namespace fp16opt
