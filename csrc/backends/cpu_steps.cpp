// The one-pass steps for every dtype, at one SIMD level. Compiled once for each level, like cpu.cpp.
#include "chunk_types.h"

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
