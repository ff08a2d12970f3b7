// What one SIMD level offers for marking and digests: each on one stretch of 16-bit words.
#pragma once

#include <cstdint>

namespace fp16opt {

// See launch/changes.h.
struct ChangesLevel {
    uint32_t (*mark)(const uint16_t* before, const uint16_t* after, int64_t n, int64_t place, uint64_t* bits, bool shared);
    uint64_t (*digest)(const uint16_t* words, int64_t n, uint32_t first);
    uint32_t (*guard)(const uint16_t* words, int64_t n, int64_t place);
    int64_t (*count)(const uint64_t* bits, int64_t n);
};

}  // namespace fp16opt
