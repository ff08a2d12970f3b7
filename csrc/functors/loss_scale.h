// How a loss scale follows the overflows: what fp16opt/scaling.py says in torch operations, bit for bit.
#pragma once

#include "../core/macros.h"

FP16OPT_BEGIN

// DynamicLossScaler's arguments, as they lie in memory. The two counts are whole numbers.
struct ScaleSettings {
    double growth_factor, backoff_factor, growth_interval, hysteresis, min_scale, max_scale;
};

struct ScaleState {
    float scale;
    int32_t clean, skips;  // steps in a row
};

// The product of two float32 numbers is exact in double, so that this rounds once, like a product in float32; a factor
// that is no float32 is multiplied as torch.amp does it.
FP16OPT_HD float moved_scale(float scale, double factor, float least, float most) {
    const float moved = float(double(scale) * factor);
    return moved < least ? least : moved > most ? most : moved;
}

FP16OPT_HD ScaleState follow(ScaleState before, bool overflow, const ScaleSettings& s) {
    const int32_t clean = overflow ? 0 : before.clean + 1, skips = overflow ? before.skips + 1 : 0;
    const bool grows = clean >= s.growth_interval, backs_off = skips >= s.hysteresis;
    const double factor = (grows ? s.growth_factor : 1.0) * (backs_off ? s.backoff_factor : 1.0);
    return {moved_scale(before.scale, factor, float(s.min_scale), float(s.max_scale)),
            clean % int32_t(s.growth_interval), skips == INT32_MAX ? 0 : skips};
}

// A static scale's part of it.
FP16OPT_HD int32_t skips_in_a_row(int32_t before, bool overflow) { return overflow ? before + 1 : 0; }

// Both, where they lie in memory: `settings` are those of a dynamic scale, and without them a scale is static.
FP16OPT_HD void follow_overflow(bool overflow, float* scale, int32_t* clean, int32_t* skips, const void* settings) {
    if (settings == nullptr) {
        if (skips != nullptr) *skips = skips_in_a_row(*skips, overflow);
        return;
    }
    ScaleSettings s;
    memcpy(&s, settings, sizeof(s));
    const ScaleState now = follow({*scale, *clean, *skips}, overflow, s);
    *scale = now.scale;
    *clean = now.clean;
    *skips = now.skips;
}

FP16OPT_END
