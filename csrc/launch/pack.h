// Lists of tensors, cut into chunks.
#pragma once

#include <cstdint>
#include <vector>

#include "chunk.h"

namespace fp16opt {

// Chunks of the tensors at `places`, in order. Empty tensors have none.
inline std::vector<Chunk> pack(const std::vector<int64_t>& numels, const std::vector<int32_t>& places) {
    size_t count = 0;
    for (int32_t place : places) count += size_t((numels[size_t(place)] + kChunk - 1) / kChunk);
    std::vector<Chunk> chunks;
    chunks.reserve(count);
    for (int32_t place : places) {
        const int64_t numel = numels[size_t(place)];
        for (int64_t start = 0; start < numel; start += kChunk) {
            const int64_t left = numel - start;
            chunks.push_back({start, place, int32_t(left < kChunk ? left : kChunk)});
        }
    }
    return chunks;
}

}  // namespace fp16opt
