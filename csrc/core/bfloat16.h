// bfloat16 <-> float32 by integer arithmetic: nearest, ties to even. The CPU's own instruction flushes subnormals.
#pragma once

#include "macros.h"

FP16OPT_BEGIN

FP16OPT_HD float bfloat16_to_float(uint16_t value) { return bit_cast<float>(uint32_t(value) << 16); }

FP16OPT_HD uint16_t float_to_bfloat16(float value) {
    const uint32_t bits = bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    // A nan must not be rounded: 0x7fffffff would become -0. Keep its upper payload and make it quiet.
    const uint32_t quiet = (bits >> 16) | 0x0040u;
    return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

FP16OPT_END
