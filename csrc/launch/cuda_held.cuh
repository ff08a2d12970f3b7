// Gradients to codes of 8 bits, and back, as programs for cuda.cuh. A block of 256 elements with one scale is the work of 32
// neighbouring threads: in one phase they measure, in the next they know the largest of it.
#pragma once

#include "../functors/held.h"
#include "cuda_operations.cuh"
#include "cuda_state8.cuh"

FP16OPT_BEGIN

constexpr int kThreadsOfHeld = kHeldBlock / kGroup;
static_assert(kRow % kHeldBlock == 0 && kChunk % kHeldBlock == 0, "rows and chunks begin where blocks do");

FP16OPT_HD float* held_scales(const Lists& lists, const Chunk& chunk) {
    return lists.at<float>(2, Chunk{chunk.start / kHeldBlock, chunk.tensor, chunk.numel});
}

// Lists: grads, codes, scales. What is not finite has any code.
struct Encode {
    static constexpr int finds = 0;
    FP16OPT_HD void report(const Entry&, const Found&) const {}
    FP16OPT_HD void finish(Shared&) const {}
};

// The largest magnitude of a thread's elements, as bits, which are in the order of the numbers.
FP16OPT_HD uint32_t largest_bits(const Stretch& grads, int i, int left) {
    Eight<float> g;
    grads.get(i, g, left);
    uint32_t most = 0;
    FP16OPT_UNROLL
    for (int k = 0; k < kGroup; ++k) most = larger_word(most, magnitude(g.v[k]));  // behind the end are zeros
    return most;
}

// With the largest magnitude of each thread's elements in s.flags.
FP16OPT_HD void encode_group(const Lists& lists, const Chunk& chunk, const Stretch& grads, int i, int left, int thread,
                             const Shared& s) {
    const int first = thread / kThreadsOfHeld * kThreadsOfHeld;
    uint32_t most = 0;
    for (int k = 0; k < kThreadsOfHeld; ++k) most = larger_word(most, s.flags[first + k]);
    const float largest = bit_cast<float>(most);
    const uint32_t dither = held_dither(uint64_t(chunk.start + i), largest);
    Eight<float> g;
    Eight<uint8_t> made;
    grads.get(i, g, left);
    made.clear();
    FP16OPT_UNROLL
    for (int k = 0; k < kGroup; ++k) {
        const float share = ratio_or_zero(magnitude_of(g.v[k], uint32_t()), largest);
        made.set(k, uint8_t(signed_code(ratio_steps(share, kRatios, ratio_dither(dither + uint32_t(k) * kIndexStride)), g.v[k])));
    }
    CodeBytes(lists, 1, chunk).set(i, made, left);
    if (i % kHeldBlock == 0) held_scales(lists, chunk)[i / kHeldBlock] = largest;
}

FP16OPT_HD void work_on(const Encode&, const Lists& lists, const Chunk& chunk, Shared& s) {
    const Stretch grads(lists.dtype(0, chunk), lists.bytes_at(0, chunk));
    for (int row = 0; row < chunk.numel; row += kRow) {
        for_threads([&](int t) {
            const int i = row + t * kGroup, left = chunk.numel - i;
            s.flags[t] = left > 0 ? largest_bits(grads, i, left) : 0;
        });
        for_threads([&](int t) {
            const int i = row + t * kGroup, left = chunk.numel - i;
            if (left > 0) encode_group(lists, chunk, grads, i, left, t, s);
        });
    }
}

// Lists: codes, outs, scales.
struct Decode {
    FP16OPT_HD bool is_needed() const { return true; }

    FP16OPT_HD void work(const Lists& lists, const Chunk& chunk, int thread) const {
        const CodeBytes codes(lists, 0, chunk);
        const Stretch outs(lists.dtype(1, chunk), lists.bytes_at(1, chunk));
        const float* const scales = held_scales(lists, chunk);
        for_each_group(chunk.numel, thread, [&](int i, int left) {
            const float scale = scales[i / kHeldBlock];
            Eight<uint8_t> coded;
            Eight<float> values;
            codes.get(i, coded, left);
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) values.v[k] = signed_of_code(upper_byte(coded.get(k)), scale, kRatioUnit);
            outs.set(i, values, left);
        });
    }
};

FP16OPT_END
