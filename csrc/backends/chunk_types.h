// From a step's chunk to whole blocks, and to the types of its gradient and its masters, at one SIMD level.
#pragma once

#include "../launch/changes.h"
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
        : to24_(c.split24), in32_(c.model, c.master, c.ahead.model, c.ahead.master),
          in24_(c.model, c.master, c.master_dither, c.ahead.model, c.ahead.master) {}

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
    return FullMaster<Model>(c.master, c.model, c.ahead.master, c.ahead.model, kCanStream && c.stream && aligned);
}

template <class Master, class Step>
uint32_t step_on(const StepChunk& c, Master master, Step&& step) {
    const Gradient<typename Master::Model> grad{c.grad, c.grad_dtype == DType::single, c.ahead.grad};
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
    if (c.model == nullptr) return step_on(c, OwnMaster(c.master, c.ahead.master), step);
    return c.model_dtype == DType::half ? step_as<Half>(c, step) : step_as<BFloat16>(c, step);
}

Distances sizes_of(const StepChunk& c, int64_t state_size) {
    return {item_size(c.grad_dtype), c.split24 ? 1 : c.split ? 2 : 4, {state_size, state_size, state_size}, 2};
}

// `numel` elements of a chunk from `start` on, in the arrays that `place(from, size, is_written)` gives for those that begin
// there. What is asked for ahead stays where it is.
template <class Place>
StepChunk part_of(const StepChunk& c, const Distances& sizes, int64_t start, int64_t numel, Place&& place) {
    StepChunk part = c;
    const auto put = [&](const void* array, int64_t& ahead, int64_t size, bool is_written) -> void* {
        if (array == nullptr) return nullptr;
        char* const from = static_cast<char*>(const_cast<void*>(array));
        char* const to = static_cast<char*>(place(from + start * size, size, is_written));
        ahead -= to - from;
        return to;
    };
    part.grad = put(c.grad, part.ahead.grad, sizes.grad, false);
    part.master = put(c.master, part.ahead.master, sizes.master, true);
    for (int k = 0; k < 3; ++k) part.state[k] = put(c.state[k], part.ahead.state[k], sizes.state[k], true);
    part.model = put(c.model, part.ahead.model, sizes.model, true);
    part.master_dither += uint32_t(start) * kMasterIndexStride;
    part.numel = numel;
    return part;
}

StepChunk in_place(const StepChunk& c, const Distances& sizes, int64_t start, int64_t end) {
    return part_of(c, sizes, start, end - start, [](char* from, int64_t, bool) { return from; });
}

StepChunk in_tail(const StepChunk& c, const Distances& sizes, int64_t start, int block, Tail& tail) {
    StepChunk part = part_of(c, sizes, start, block, [&](char* from, int64_t size, bool is_written) {
        return is_written ? tail.take(from, size) : tail.read(from, size);
    });
    part.stream = false;
    return part;
}

// How far ahead of the arithmetic a loop asks for memory of its own chunk, in elements: the processor's prefetcher stops at every
// page, and a step walks through five arrays at once.
constexpr int64_t kAheadInChunk = 256;

// Elements that are stepped and then compared with what they were.
constexpr int64_t kMarkedPart = 1024;

// Calls step(part, start) for the whole blocks of a chunk, and for what is left. Loops over the last of them ask for the
// beginning of the chunk that c.ahead leads to. `overlaps`: what is left may go as a block with elements before it, which are
// stepped twice, from the same numbers to the same numbers; that takes half as long as one that is filled up.
template <class Step>
uint32_t step_whole_blocks(const StepChunk& c, int block, int64_t state_size, bool overlaps, Step&& step) {
    const Distances sizes = sizes_of(c, state_size);
    const int64_t rest = c.numel % block, whole = c.numel - rest;
    const int64_t last = c.numel <= kAheadInChunk ? 0 : (c.numel - kAheadInChunk + block - 1) / block * block;
    uint32_t flags = 0;
    if (last > 0) {
        StepChunk part = in_place(c, sizes, 0, last);
        part.ahead = {sizes.grad * kAheadInChunk, sizes.master * kAheadInChunk, {}, 0};
        for (int64_t& ahead : part.ahead.state) ahead = state_size * kAheadInChunk;
        if (c.split || c.split24) part.ahead.model = sizes.model * kAheadInChunk;  // others are only written, and nothing waits
        if (c.bits != nullptr) part.ahead.model = sizes.model * kMarkedPart;
        flags = step(part, int64_t(0));
    }
    const int64_t valid = overlaps && rest > 0 && whole > 0 ? block : rest;
    Tail tail(valid, block);
    if (valid > 0) flags |= step(in_tail(c, sizes, c.numel - valid, block, tail), c.numel - valid);
    if (whole > last) flags |= step(in_place(c, sizes, last, whole), last);
    tail.give_back();
    return flags;
}

// The same, and marks weights that get other bits: a part is stepped and then compared with what it was, while all of it is in
// the first-level cache.
template <class Step>
FP16OPT_NOINLINE uint32_t step_and_mark(const StepChunk& c, int block, int64_t state_size, bool overlaps, Step&& step) {
    const Distances sizes = sizes_of(c, state_size);
    uint32_t flags = 0, guard = 0;
    alignas(64) uint16_t before[kMarkedPart];
    for (int64_t start = 0; start < c.numel; start += kMarkedPart) {
        const int64_t end = start + kMarkedPart < c.numel ? start + kMarkedPart : c.numel;
        StepChunk part = in_place(c, sizes, start, end);
        if (end < c.numel) {
            part.ahead = {sizes.grad * kMarkedPart, sizes.master * kMarkedPart, {}, sizes.model * kMarkedPart};
            for (int64_t& ahead : part.ahead.state) ahead = state_size * kMarkedPart;
        }
        memcpy(before, part.model, size_t(part.numel) * sizeof(uint16_t));
        flags |= step_whole_blocks(part, block, state_size, overlaps,
                                   [&](const StepChunk& blocks, int64_t at) { return step(blocks, start + at); });
        guard += mark_words(before, static_cast<const uint16_t*>(part.model), part.numel, c.place + start, c.bits, c.shared);
    }
    if (guard != 0) __atomic_fetch_add(c.guard, guard, __ATOMIC_RELAXED);
    return flags;
}

template <class Step>
uint32_t for_whole_blocks(const StepChunk& c, int block, int64_t state_size, bool overlaps, Step&& step) {
    if (c.bits != nullptr) return step_and_mark(c, block, state_size, overlaps, step);
    return step_whole_blocks(c, block, state_size, overlaps, step);
}

}  // namespace
FP16OPT_END
