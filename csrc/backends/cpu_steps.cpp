// The one-pass steps for every dtype, at one SIMD level. Compiled once for each level, like cpu.cpp.
#include "../launch/split.h"
#include "step_level.h"

FP16OPT_BEGIN
namespace {

template <class Grad, class Master>
uint32_t adam_as(const StepChunk& c, Master master, const AdamTerms<Floats>& terms) {
    const Grad* grad = static_cast<const Grad*>(c.grad);
    if (c.largest != nullptr) {
        adam_loop<Grad, Master, true>(terms, grad, master, c.exp_avg, c.exp_avg_sq, c.largest, c.numel);
    } else {
        adam_loop<Grad, Master, false>(terms, grad, master, c.exp_avg, c.exp_avg_sq, nullptr, c.numel);
    }
    return master.flags();
}

template <class Grad, class Master>
uint32_t sgd_as(const StepChunk& c, Master master, const SgdTerms<Floats>& terms, bool first) {
    const Grad* grad = static_cast<const Grad*>(c.grad);
    if (c.exp_avg == nullptr) {
        sgd_loop<Grad, Master, Momentum::none>(terms, grad, master, nullptr, c.numel);
    } else if (first) {
        sgd_loop<Grad, Master, Momentum::first>(terms, grad, master, c.exp_avg, c.numel);
    } else {
        sgd_loop<Grad, Master, Momentum::later>(terms, grad, master, c.exp_avg, c.numel);
    }
    return master.flags();
}

template <class Model>
FullMaster<Model> full(const StepChunk& c) {
    const bool aligned = reinterpret_cast<uintptr_t>(c.model) % 64 == 0;  // streaming stores need it
    return FullMaster<Model>(c.master, c.model, kCanStream && c.stream && aligned);
}

template <class Model>
SplitMaster<Model> split(const StepChunk& c) {
    return SplitMaster<Model>(c.model, c.master);
}

// Calls step(gradient, master) with the types of this chunk. A 16-bit gradient has its parameter's dtype; an FP32 one is a
// gradient that was unscaled before.
template <class Model, class Step>
uint32_t step_as(const StepChunk& c, Step&& step) {
    const bool wide = c.grad_dtype == DType::single;
    if (c.split) return wide ? step(float(), split<Model>(c)) : step(Model(), split<Model>(c));
    return wide ? step(float(), full<Model>(c)) : step(Model(), full<Model>(c));
}

template <class Step>
uint32_t step_any(const StepChunk& c, Step&& step) {
    if (c.model == nullptr) return step(float(), OwnMaster(c.master));
    return c.model_dtype == DType::half ? step_as<Half>(c, step) : step_as<BFloat16>(c, step);
}

uint32_t adam_chunk(const StepChunk& c, const GradFactors& factors, const AdamScalars& scalars) {
    const AdamTerms<Floats> terms(factors, scalars, SplatFloats{});
    return step_any(c, [&](auto grad, auto master) { return adam_as<decltype(grad)>(c, master, terms); });
}

uint32_t sgd_chunk(const StepChunk& c, const GradFactors& factors, const SgdScalars& scalars) {
    const SgdTerms<Floats> terms(factors, scalars, SplatFloats{});
    const bool first = scalars.first != 0;
    return step_any(c, [&](auto grad, auto master) { return sgd_as<decltype(grad)>(c, master, terms, first); });
}

uint32_t lion_chunk(const StepChunk& c, const GradFactors& factors, const LionScalars& scalars) {
    const LionTerms<Floats> terms(factors, scalars, SplatFloats{});
    return step_any(c, [&](auto grad, auto master) {
        using Grad = decltype(grad);
        lion_loop<Grad>(terms, static_cast<const Grad*>(c.grad), master, c.exp_avg, c.numel);
        return master.flags();
    });
}

}  // namespace

extern const StepLevel step_level;
const StepLevel step_level = {adam_chunk, sgd_chunk, lion_chunk};

FP16OPT_END
