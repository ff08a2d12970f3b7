// From a step's chunk to the types of its gradient and its masters, at one SIMD level.
#pragma once

#include "../launch/split.h"
#include "../launch/split24.h"
#include "step_level.h"

FP16OPT_BEGIN
namespace {

template <class Model>
FullMaster<Model> full(const StepChunk& c) {
    const bool aligned = reinterpret_cast<uintptr_t>(c.model) % 64 == 0;  // streaming stores need it
    return FullMaster<Model>(c.master, c.model, kCanStream && c.stream && aligned);
}

template <class Model>
SplitMaster<Model> split(const StepChunk& c) {
    return SplitMaster<Model>(c.model, c.master);
}

template <class Model>
Split24Master<Model> split24(const StepChunk& c) {
    return Split24Master<Model>(c.model, c.master, c.master_dither);
}

// Calls step(gradient, master) with the types of this chunk. A 16-bit gradient has its parameter's dtype; an FP32 one is a
// gradient that was unscaled before.
template <class Model, class Step>
uint32_t step_as(const StepChunk& c, Step&& step) {
    const bool wide = c.grad_dtype == DType::single;
    if (c.split24) return wide ? step(float(), split24<Model>(c)) : step(Model(), split24<Model>(c));
    if (c.split) return wide ? step(float(), split<Model>(c)) : step(Model(), split<Model>(c));
    return wide ? step(float(), full<Model>(c)) : step(Model(), full<Model>(c));
}

template <class Step>
uint32_t step_any(const StepChunk& c, Step&& step) {
    if (c.model == nullptr) return step(float(), OwnMaster(c.master));
    return c.model_dtype == DType::half ? step_as<Half>(c, step) : step_as<BFloat16>(c, step);
}

}  // namespace
FP16OPT_END
