// What a step decides between its passes, as programs for one block: numbers in, numbers out, and the bookkeeping of a
// step's end. Each takes the place of a dozen launches that would each move a few bytes.
#pragma once

#include "../functors/clip.h"
#include "../functors/loss_scale.h"
#include "cuda.cuh"

FP16OPT_BEGIN

// pair = {scale, 1 / scale}: a scale that keeps its value while the scaler's own moves on.
struct CaptureScale {
    const float* scale;
    float* pair;

    FP16OPT_HD void run() const {
        for_threads([&](int t) {
            if (t != 0) return;
            const float value = *scale;
            pair[0] = value;
            pair[1] = 1.0f / value;
        });
    }
};

// The norm in float32, and what gradients are multiplied by: 1 where one of them is not finite.
struct DecideClip {
    const double* norm;
    const float* found_inf;
    double max_norm;
    bool only_finite;
    float *single, *factor;

    FP16OPT_HD void run() const {
        for_threads([&](int t) {
            if (t == 0) decide_clip(*norm, found_inf, only_finite, max_norm, single, factor);
        });
    }
};

struct CudaClosing {
    const float* found_inf;  // 0 or 1; null where no caller is told of an overflow here
    float* last;             // becomes found_inf; or null
    double* skipped;         // found_inf is added; or null
    float* scale;            // follows, with `settings` and the two counts; null for a static scale
    int32_t *clean, *skips;
    const double* settings;  // a ScaleSettings
    const int32_t* flags;    // n of them
    int32_t* kept;           // take their values
    int64_t n;
    uint32_t* cleared;  // `words` of them become 0
    int64_t words;
};

// The end of a step: the scale follows, the outcome is counted, flags are kept, and statistics cleared for the next step.
struct CloseStep {
    CudaClosing c;

    FP16OPT_HD void run() const {
        for_threads([&](int t) {
            for (int64_t i = t; i < c.n; i += kThreads) c.kept[i] = c.flags[i];
            if (t != 0 || c.found_inf == nullptr) return;
            const float found = *c.found_inf;
            follow_overflow(found != 0.0f, c.scale, c.clean, c.skips, c.settings);
            if (c.last != nullptr) *c.last = found;
            if (c.skipped != nullptr) *c.skipped += double(found);
        });
        for_threads([&](int t) {  // which may hold found_inf, and the flags
            for (int64_t i = t; i < c.words; i += kThreads) c.cleared[i] = 0;
        });
    }
};

FP16OPT_END
