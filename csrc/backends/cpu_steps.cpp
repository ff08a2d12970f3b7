// The one-pass steps for every dtype, at one SIMD level. Compiled once for each level, like cpu.cpp.
#include "chunk_types.h"

FP16OPT_BEGIN
namespace {

float* state_of(const StepChunk& c, int k) { return static_cast<float*>(c.state[k]); }

template <class Master>
uint32_t adam_as(const StepChunk& c, Master master, const AdamTerms<Floats>& terms) {
    const auto grad = gradient_of(c, master);
    if (c.state[2] != nullptr) {
        adam_loop<true>(terms, grad, master, state_of(c, 0), state_of(c, 1), state_of(c, 2), c.numel);
    } else {
        adam_loop<false>(terms, grad, master, state_of(c, 0), state_of(c, 1), nullptr, c.numel);
    }
    return master.flags();
}

template <class Master>
uint32_t sgd_as(const StepChunk& c, Master master, const SgdTerms<Floats>& terms, bool first) {
    const auto grad = gradient_of(c, master);
    if (c.state[0] == nullptr) {
        sgd_loop<Momentum::none>(terms, grad, master, nullptr, c.numel);
    } else if (first) {
        sgd_loop<Momentum::first>(terms, grad, master, state_of(c, 0), c.numel);
    } else {
        sgd_loop<Momentum::later>(terms, grad, master, state_of(c, 0), c.numel);
    }
    return master.flags();
}

template <class Master>
uint32_t lion_as(const StepChunk& c, Master master, const LionTerms<Floats>& terms) {
    lion_loop(terms, gradient_of(c, master), master, state_of(c, 0), c.numel);
    return master.flags();
}

template <class Step>
uint32_t for_steps(const StepChunk& c, Step&& step) {
    return for_whole_blocks(c, kBlock, int(sizeof(float)), [&](const StepChunk& part, int64_t) {
        return step_any(part, [&](auto master) { return step(part, master); });
    });
}

uint32_t adam_chunk(const StepChunk& c, const GradFactors& factors, const AdamScalars& scalars) {
    const AdamTerms<Floats> terms(factors, scalars, SplatFloats{});
    return for_steps(c, [&](const StepChunk& part, auto master) { return adam_as(part, master, terms); });
}

uint32_t sgd_chunk(const StepChunk& c, const GradFactors& factors, const SgdScalars& scalars) {
    const SgdTerms<Floats> terms(factors, scalars, SplatFloats{});
    const bool first = scalars.first != 0;
    return for_steps(c, [&](const StepChunk& part, auto master) { return sgd_as(part, master, terms, first); });
}

uint32_t lion_chunk(const StepChunk& c, const GradFactors& factors, const LionScalars& scalars) {
    const LionTerms<Floats> terms(factors, scalars, SplatFloats{});
    return for_steps(c, [&](const StepChunk& part, auto master) { return lion_as(part, master, terms); });
}

}  // namespace

extern const StepLevel step_level;
const StepLevel step_level = {adam_chunk, sgd_chunk, lion_chunk};

FP16OPT_END
