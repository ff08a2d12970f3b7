// Lists of tensors, cut into chunks.
#pragma once

#include <cstdint>
#include <vector>

#include "chunk.h"

namespace fp16opt {

// Chunks of the tensors at `places`, in order. Empty tensors have none. `pieces` are by place; without any, tensors are whole.
inline std::vector<Chunk> pack(const std::vector<int64_t>& numels, const std::vector<int32_t>& places,
                               const std::vector<Piece>& pieces = {}) {
    std::vector<Chunk> chunks;
    for (int32_t place : places) {
        const int64_t numel = numels[size_t(place)];
        const Piece piece = pieces.empty() ? Piece{0, 0, 0} : pieces[size_t(place)];
        const int64_t unit = piece.unit == 0 ? numel : piece.unit;
        for (int64_t first = 0, index = piece.offset, block = 0; first < numel; first += unit, index += piece.stride) {
            for (int64_t at = 0; at < unit; at += kChunk) {
                const int64_t left = unit - at;
                chunks.push_back({first + at, place, int32_t(left < kChunk ? left : kChunk), uint32_t(index + at),
                                  uint32_t(block + at / kScaled)});
            }
            block += (unit + kScaled - 1) / kScaled;
        }
    }
    return chunks;
}

}  // namespace fp16opt
