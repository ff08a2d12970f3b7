// What one SIMD level offers: every operation on one chunk. The list operations call it through this table.
#pragma once

#include "../core/dtype.h"

namespace fp16opt {

struct UnscaleResult {
    double sumsq;
    uint32_t flags;
};

enum CheckInputs : uint32_t { kCheckX = 1, kCheckY = 2 };

struct StepLevel;  // step_level.h
struct SplitLevel;  // split_level.h
struct State8Level;  // state8_level.h
struct MeasureLevel;  // measure_level.h
struct ChangesLevel;  // changes_level.h

// Pointers are to the chunk's first element and need no more than the element's own alignment.
// `stream`: write around the caches. What rounds to 16 bits returns flags.
struct CpuLevel {
    const char* name;
    // `out`: may be nullptr, where nothing is to be written.
    UnscaleResult (*unscale)(DType from, const void* grad, void* out, int64_t n, float inv_scale, bool add, bool stream);
    void (*unscale_clipped)(DType from, const void* grad, void* out, int64_t n, float inv_scale, float factor, bool stream);
    double (*sum_of_squares)(DType dtype, const void* values, int64_t n);
    void (*scale)(DType dtype, void* values, int64_t n, float factor);
    // averages: double for wide, else float
    void (*lerp)(DType of, void* averages, const void* values, int64_t n, double part, bool from_average);
    bool (*axpby)(const DType (&dtypes)[3], float a, const void* x, float b, const void* y, void* out, int64_t n,
                  uint32_t check);  // true: a checked input is not finite
    uint32_t (*cast)(DType to, const float* master, void* param, int64_t n, bool stream);
    uint64_t (*sample_words)(const void* values, int64_t words);  // of a short tensor, from the first on
    const StepLevel* steps;
    const SplitLevel* splits;
    const State8Level* state8;
    const MeasureLevel* measures;
    const ChangesLevel* changes;
};

// The levels that this build holds and this machine runs, the fastest first. Ends with nullptr.
const CpuLevel* const* supported_levels();

// The level in use. The first call takes FP16OPT_SIMD from the environment where it is set, else the fastest.
// Throws std::invalid_argument for a name that is not in supported_levels().
const CpuLevel& current_level();
void use_level(const char* name);

}  // namespace fp16opt
