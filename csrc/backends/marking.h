// Passes that round masters into 16-bit weights, and mark which of these got other bits.
#pragma once

#include "../api_changes.h"
#include "changes_level.h"
#include "lists.h"

namespace fp16opt {

// Elements that are rounded and then compared with what they were, while all is in the first-level cache.
constexpr int64_t kRoundedPart = 1024;

// Of pieces chunks may begin and end within a word of bits.
inline bool shares_words(const Table& table, const Chunk& c) {
    const int64_t end = c.start + c.numel;
    return c.start % 64 != 0 || (end % 64 != 0 && end != table.numels[size_t(c.tensor)]);
}

// Calls round(part) for parts of a chunk, and marks what it writes at `models`. Returns its flags.
template <class Round>
uint32_t round_and_mark(const Table& table, const Pointers& models, const Marks& marks, const Chunk& c, Round&& round) {
    const size_t place = size_t(c.tensor);
    uint64_t* const own = marks.memory + marks.offsets[place];
    const uint16_t* const weights = static_cast<const uint16_t*>(models[place]);
    const bool shared = shares_words(table, c);
    uint32_t flags = 0, guard = 0;
    alignas(64) uint16_t before[kRoundedPart];
    for (int64_t start = 0; start < c.numel; start += kRoundedPart) {
        const int64_t left = c.numel - start;
        const Chunk part = {c.start + start, c.tensor, int32_t(left < kRoundedPart ? left : kRoundedPart), 0, 0};
        memcpy(before, weights + part.start, size_t(part.numel) * sizeof(uint16_t));
        for (int64_t i = kRoundedPart; i < 2 * kRoundedPart; i += 32) __builtin_prefetch(weights + part.start + i);
        flags |= round(part);
        guard += current_level().changes->mark(before, weights + part.start, part.numel, part.start, own + 1, shared);
    }
    if (guard != 0) __atomic_fetch_add(reinterpret_cast<uint32_t*>(own), guard, __ATOMIC_RELAXED);
    return flags;
}

}  // namespace fp16opt
