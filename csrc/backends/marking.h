// Passes that round masters into 16-bit weights, and mark which of these got other bits.
#pragma once

#include "../api_changes.h"
#include "changes_level.h"
#include "lists.h"

namespace fp16opt {

// Elements that are rounded and then compared with what they were, while all is in the first-level cache. As many as loops of
// steps ask for memory ahead: they ask for that of the next part then, the weights' too.
constexpr int64_t kMarkedPart = 256;
static_assert(kMarkedPart % kScaled == 0 && kChunk % kMarkedPart == 0, "parts begin where words of bits and blocks do");

inline Chunk part_at(const Chunk& c, int64_t start) {
    const int64_t left = c.numel - start;
    return {c.start + start, c.tensor, int32_t(left < kMarkedPart ? left : kMarkedPart), c.index + uint32_t(start),
            c.block + uint32_t(start / kScaled)};
}

// Calls round(part, next) for parts of a chunk, and marks what it writes at `models`; `next` is the part behind it, or null.
// Returns its flags.
template <class Round>
uint32_t round_and_mark(const Table& table, const Pointers& models, const Marks& marks, const Chunk& c, Round&& round) {
    const size_t place = size_t(c.tensor);
    uint64_t* const sum = marks.memory + marks.offsets[table.rows[place]];
    const uint16_t* const weights = static_cast<const uint16_t*>(models[place]);
    // Of pieces chunks may begin and end within a word of bits.
    const bool shared = c.start % 64 != 0 || ((c.start + c.numel) % 64 != 0 && c.start + c.numel != table.numels[place]);
    uint32_t flags = 0;
    uint32_t left = 0;
    alignas(64) uint16_t before[kMarkedPart];
    for (int64_t start = 0; start < c.numel; start += kMarkedPart) {
        const Chunk part = part_at(c, start);
        memcpy(before, weights + part.start, size_t(part.numel) * sizeof(uint16_t));
        if (start + part.numel < c.numel) {
            const Chunk next = part_at(c, start + kMarkedPart);
            flags |= round(part, &next);
        } else {
            flags |= round(part, static_cast<const Chunk*>(nullptr));
        }
        left += current_level().changes->mark(before, weights + part.start, part.numel, part.start, sum + 1, shared);
    }
    if (left != 0) __atomic_fetch_add(reinterpret_cast<uint32_t*>(sum), left, __ATOMIC_RELAXED);
    return flags;
}

}  // namespace fp16opt
