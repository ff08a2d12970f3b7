// The CPU loops that code gradients in 8 bits, and decode them: blocks of 256 elements, in quarters of 64.
#pragma once

#include "state8.h"

#include "../functors/held.h"

FP16OPT_BEGIN

constexpr int kQuarters = kHeldBlock / kBlock;

// Whole blocks; `index` is the first element's. What is not finite has any code.
FP16OPT_HD void encode_blocks(DType from, const char* grads, int8_t* codes, float* scales, uint32_t index, int64_t n) {
    const Floats units = splat(kRatios);
    for (int64_t i = 0; i < n; i += kHeldBlock) {
        Block values[kQuarters];
        Floats most = splat(0.0f);
        for (int q = 0; q < kQuarters; ++q) {
            load_as(from, grads + (i + q * kBlock) * item_size(from), values[q]);
            for (int k = 0; k < kVectors; ++k) most = larger(most, magnitude_of(values[q].v[k], Words()));
        }
        const float largest = largest_lane(most);
        scales[i / kHeldBlock] = largest;
        if (FP16OPT_UNLIKELY(!(largest > 0.0f))) {
            memset(codes + i, 0, kHeldBlock);
            continue;
        }
        const Floats per = splat(largest);
        const uint32_t dither = held_dither(index + uint32_t(i), largest);
        for (int q = 0; q < kQuarters; ++q) {
            Block ratios;
            for (int k = 0; k < kVectors; ++k) ratios.v[k] = ratio_to_code(values[q].v[k], per);
            code_ratios(codes + i + q * kBlock, ratios, values[q], nullptr, units, dither + uint32_t(q * kBlock) * kIndexStride);
        }
    }
}

FP16OPT_HD void put_as(DType to, char* out, const Block& b) {
    switch (to) {
        case DType::half: return put(reinterpret_cast<Half*>(out), b);
        case DType::bfloat16: return put(reinterpret_cast<BFloat16*>(out), b);
        default: return put(reinterpret_cast<float*>(out), b);
    }
}

FP16OPT_HD void decode_blocks(DType to, const int8_t* codes, const float* scales, char* outs, int64_t n) {
    const Floats unit = splat(kRatioUnit);
    for (int64_t i = 0; i < n; i += kBlock) {
        const Floats scale = splat(scales[i / kHeldBlock]);
        Codes coded;
        Block values;
        get(static_cast<const int8_t*>(codes + i), coded);
        for (int k = 0; k < kVectors; ++k) values.v[k] = signed_of_code(coded.v[k], scale, unit);
        put_as(to, outs + i * item_size(to), values);
    }
}

FP16OPT_END
