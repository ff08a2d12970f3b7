// From a step's chunk to whole blocks, and to the types of its gradient and its masters, at one SIMD level.
#pragma once

#include "../launch/split.h"
#include "../launch/split24.h"
#include "../launch/tail.h"
#include "step_level.h"

FP16OPT_BEGIN
namespace {

template <class Model>
FullMaster<Model> full(const StepChunk& c) {
    const bool aligned = reinterpret_cast<uintptr_t>(c.model) % 64 == 0;  // streaming stores need it
    return FullMaster<Model>(c.master, c.model, kCanStream && c.stream && aligned);
}

// Calls step(master) with the type of this chunk's masters.
template <class Model, class Step>
uint32_t step_as(const StepChunk& c, Step&& step) {
    if (c.split24) return step(Split24Master<Model>(c.model, c.master, c.master_dither));
    if (c.split) return step(SplitMaster<Model>(c.model, c.master));
    return step(full<Model>(c));
}

template <class Step>
uint32_t step_any(const StepChunk& c, Step&& step) {
    if (c.model == nullptr) return step(OwnMaster(c.master));
    return c.model_dtype == DType::half ? step_as<Half>(c, step) : step_as<BFloat16>(c, step);
}

template <class Master>
Gradient<typename Master::Model> gradient_of(const StepChunk& c, const Master&) {
    return {c.grad, c.grad_dtype == DType::single};
}

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
