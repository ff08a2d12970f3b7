// From a step's chunk to whole blocks, and to its gradient and its masters, at one SIMD level.
#pragma once

#include "../launch/split.h"
#include "../launch/split24.h"
#include "../launch/tail.h"
#include "step_level.h"

FP16OPT_BEGIN
namespace {

// Split masters of a kind that is known only at run time. One branch for 64 elements costs nothing beside what splitting takes,
// and loops are compiled once for all four.
class AnySplitMaster {
public:
    explicit FP16OPT_HD AnySplitMaster(const StepChunk& c)
        : half_(c.model_dtype == DType::half), to24_(c.split24), of_half_(c.model, c.master), of_bfloat16_(c.model, c.master),
          of_half24_(c.model, c.master, c.master_dither), of_bfloat1624_(c.model, c.master, c.master_dither) {}

    FP16OPT_HD void read(int64_t i, Block& p) const {
        if (to24_) return half_ ? of_half24_.read(i, p) : of_bfloat1624_.read(i, p);
        return half_ ? of_half_.read(i, p) : of_bfloat16_.read(i, p);
    }
    FP16OPT_HD void write(int64_t i, const Block& p) {
        if (to24_) return half_ ? of_half24_.write(i, p) : of_bfloat1624_.write(i, p);
        return half_ ? of_half_.write(i, p) : of_bfloat16_.write(i, p);
    }
    FP16OPT_HD void finish() const {}
    FP16OPT_HD uint32_t flags() const {  // those that nothing was written to have none
        return of_half_.flags() | of_bfloat16_.flags() | of_half24_.flags() | of_bfloat1624_.flags();
    }

private:
    bool half_, to24_;
    SplitMaster<Half> of_half_;
    SplitMaster<BFloat16> of_bfloat16_;
    Split24Master<Half> of_half24_;
    Split24Master<BFloat16> of_bfloat1624_;
};

template <class Model>
FullMaster<Model> full(const StepChunk& c) {
    const bool aligned = reinterpret_cast<uintptr_t>(c.model) % 64 == 0;  // streaming stores need it
    return FullMaster<Model>(c.master, c.model, kCanStream && c.stream && aligned);
}

template <class Master, class Step>
uint32_t step_on(Master master, Step&& step) {
    step(master);
    return master.flags();
}

// Calls step(master) with the type of this chunk's masters.
template <class Step>
uint32_t step_any(const StepChunk& c, Step&& step) {
    if (c.model == nullptr) return step_on(OwnMaster(c.master), step);
    if (c.split || c.split24) return step_on(AnySplitMaster(c), step);
    return c.model_dtype == DType::half ? step_on(full<Half>(c), step) : step_on(full<BFloat16>(c), step);
}

Gradient gradient_of(const StepChunk& c) { return {c.grad, c.grad_dtype}; }

// The incomplete block at `start` as a whole one.
StepChunk whole_block_of(const StepChunk& c, int64_t start, int block, int state_size, Tail& tail) {
    StepChunk whole = c;
    const auto take = [&](void* array, int size) {
        return array == nullptr ? nullptr : tail.take(static_cast<char*>(array) + start * size, size);
    };
    const int64_t grad_size = item_size(c.grad_dtype);
    whole.grad = tail.read(static_cast<const char*>(c.grad) + start * grad_size, grad_size);
    whole.master = take(c.master, c.split24 ? 1 : c.split ? 2 : 4);
    for (void*& state : whole.state) state = take(state, state_size);
    whole.model = take(c.model, 2);
    whole.master_dither += uint32_t(start) * kMasterIndexStride;
    whole.numel = block;
    whole.stream = false;
    return whole;
}

// Calls step(part, start) for the whole blocks of a chunk, and for what is left.
template <class Step>
uint32_t for_whole_blocks(const StepChunk& c, int block, int state_size, Step&& step) {
    uint32_t flags = 0;
    const int64_t rest = c.numel % block, start = c.numel - rest;
    if (start > 0) {
        StepChunk whole = c;
        whole.numel = start;
        flags = step(whole, int64_t(0));
    }
    if (rest > 0) {
        Tail tail(rest, block);
        flags |= step(whole_block_of(c, start, block, state_size, tail), start);
        tail.give_back();
    }
    return flags;
}

}  // namespace
FP16OPT_END
