// From a step's chunk to whole blocks, and to the types of its gradient and its masters, at one SIMD level.
#pragma once

#include "../launch/split.h"
#include "../launch/split24.h"
#include "../launch/tail.h"
#include "step_level.h"

FP16OPT_BEGIN
namespace {

// Split masters whose remainders have 16 or 8 bits: known only at run time. One branch for 64 elements costs little beside what
// splitting takes, and loops are compiled once for both.
template <class Weight>
class AnySplitMaster {
public:
    typedef Weight Model;

    explicit FP16OPT_HD AnySplitMaster(const StepChunk& c)
        : to24_(c.split24), in32_(c.model, c.master), in24_(c.model, c.master, c.master_dither) {}

    FP16OPT_HD void read(int64_t i, Block& p) const {
        if (to24_) return in24_.read(i, p);
        in32_.read(i, p);
    }
    FP16OPT_HD void write(int64_t i, const Block& p) {
        if (to24_) return in24_.write(i, p);
        in32_.write(i, p);
    }
    FP16OPT_HD void finish() const {}
    FP16OPT_HD uint32_t flags() const { return in32_.flags() | in24_.flags(); }  // one of them was not written to

private:
    bool to24_;
    SplitMaster<Weight> in32_;
    Split24Master<Weight> in24_;
};

template <class Model>
FullMaster<Model> full(const StepChunk& c) {
    const bool aligned = reinterpret_cast<uintptr_t>(c.model) % 64 == 0;  // streaming stores need it
    return FullMaster<Model>(c.master, c.model, kCanStream && c.stream && aligned);
}

template <class Master, class Step>
uint32_t step_on(const StepChunk& c, Master master, Step&& step) {
    const Gradient<typename Master::Model> grad{c.grad, c.grad_dtype == DType::single};
    step(grad, master);
    return master.flags();
}

// Calls step(gradient, master) with the types of this chunk's.
template <class Model, class Step>
uint32_t step_as(const StepChunk& c, Step&& step) {
    if (c.split || c.split24) return step_on(c, AnySplitMaster<Model>(c), step);
    return step_on(c, full<Model>(c), step);
}

template <class Step>
uint32_t step_any(const StepChunk& c, Step&& step) {
    if (c.model == nullptr) return step_on(c, OwnMaster(c.master), step);
    return c.model_dtype == DType::half ? step_as<Half>(c, step) : step_as<BFloat16>(c, step);
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
