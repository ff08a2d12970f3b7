// Which 16-bit weights got other bits, free of Python and torch like api.h.
#pragma once

#include "api.h"

namespace fp16opt {

// Where passes mark what they change. A tensor's memory is a word, the part of its guard (functors/digest.h, by places in
// memory) that the marked elements had before they were marked, in the lower half, and a bit for each element, from the lowest on.
struct Marks {
    uint64_t* memory;        // null: nothing is marked
    const int64_t* offsets;  // by row: where its tensor's memory begins, in words
};

// The sum of the terms of words that follow one another in the whole tensor.
uint64_t digest(const uint16_t* words, int64_t n, uint32_t first, int threads);

// The guard of a whole tensor.
uint32_t guard(const uint16_t* words, int64_t n, int threads);

// Both of a tensor whose words follow one another in memory as in the whole: memory is read once.
struct GuardAndDigest {
    uint32_t guard;
    uint64_t digest;
};
GuardAndDigest guard_and_digest(const uint16_t* words, int64_t n, uint32_t first, int threads);

// How many bits of a tensor are set.
int64_t count_marked(const uint64_t* bits, int64_t n, int threads);

// Places and words of the marked elements, of which there are `count`; returns their part of the guard.
// `places` are int32, or int64 with `wide`.
uint32_t take_marked(const uint64_t* bits, const uint16_t* words, int64_t n, void* places, bool wide, uint16_t* taken,
                     int threads);

}  // namespace fp16opt
