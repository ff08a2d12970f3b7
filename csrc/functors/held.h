// Gradients that wait for a step in codes of 8 bits: the code of SGD's momentum (ratio8.h), in blocks of 256. The dither comes of
// the element's place and of the block's scale, so that nothing has to be remembered, and the same gradient has the same code.
#pragma once

#include "ratio8.h"

FP16OPT_BEGIN

constexpr int kHeldBlock = 256;  // consecutive elements in memory order, of one tensor, with one scale: their largest magnitude

// Gradients of 16 bits have nothing in the lower 13 bits of a scale.
FP16OPT_HD uint32_t held_dither(uint64_t index, float scale) { return dither_at(index, bit_cast<uint32_t>(scale) >> 13); }

FP16OPT_END
