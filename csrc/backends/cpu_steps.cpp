// The one-pass steps for every dtype, at one SIMD level. Compiled once for each level, as cpu.cpp is.
#include "../launch/state8.h"
#include "chunk_types.h"
#include "state8_level.h"

FP16OPT_BEGIN
namespace {

float* state_of(const StepChunk& c, int k) { return static_cast<float*>(c.state[k]); }

// Calls step(part, master) for the whole blocks of a chunk, and for what is left.
template <class Step>
uint32_t for_steps(const StepChunk& c, Step&& step) {
    return for_whole_blocks(c, kBlock, int(sizeof(float)), [&](const StepChunk& part, int64_t) {
        return step_any(part, [&](const auto& grad, auto& master) { step(part, grad, master); });
    });
}

uint32_t adam_chunk(const StepChunk& c, const GradFactors& factors, const AdamScalars& scalars) {
    const AdamTerms<Floats> terms(factors, scalars, SplatFloats{});
    return for_steps(c, [&](const StepChunk& part, const auto& grad, auto& master) {
        adam_loop(terms, grad, master, state_of(part, 0), state_of(part, 1), state_of(part, 2), part.numel);
    });
}

uint32_t sgd_chunk(const StepChunk& c, const GradFactors& factors, const SgdScalars& scalars) {
    const SgdTerms<Floats> terms(factors, scalars, SplatFloats{});
    const Momentum momentum = c.state[0] == nullptr ? Momentum::none : scalars.first != 0 ? Momentum::first : Momentum::later;
    return for_steps(c, [&](const StepChunk& part, const auto& grad, auto& master) {
        sgd_loop(terms, grad, master, momentum, state_of(part, 0), part.numel);
    });
}

uint32_t lion_chunk(const StepChunk& c, const GradFactors& factors, const LionScalars& scalars) {
    const LionTerms<Floats> terms(factors, scalars, SplatFloats{});
    return for_steps(c, [&](const StepChunk& part, const auto& grad, auto& master) {
        lion_loop(terms, grad, master, state_of(part, 0), part.numel);
    });
}

// -- with 8-bit state --------------------------------------------------------------------------------------------------

// Calls step(part, master, state) for the whole blocks of a chunk, and for what is left.
template <class Step>
uint32_t for_steps(const StepChunk& c, const State8Chunk& s, Step&& step) {
    return for_whole_blocks(c, kStateBlock, 1, [&](const StepChunk& part, int64_t start) {
        const StateCodes state{static_cast<int8_t*>(part.state[0]), static_cast<uint8_t*>(part.state[1]),
                               s.scales + start / kStateBlock, s.limit, s.dither + uint32_t(start) * kIndexStride};
        return step_any(part, [&](const auto& grad, auto& master) { step(part, grad, master, state); });
    });
}

uint32_t adam8_chunk(const StepChunk& c, const State8Chunk& s, const GradFactors& factors, const AdamScalars& scalars) {
    const AdamTerms<Floats> terms(factors, scalars, SplatFloats{});
    return for_steps(c, s, [&](const StepChunk& part, const auto& grad, auto& master, const StateCodes& state) {
        adam8_loop(terms, grad, master, state, part.numel);
    });
}

uint32_t sgd8_chunk(const StepChunk& c, const State8Chunk& s, const GradFactors& factors, const SgdScalars& scalars) {
    const SgdTerms<Floats> terms(factors, scalars, SplatFloats{});
    const bool first = scalars.first != 0;
    return for_steps(c, s, [&](const StepChunk& part, const auto& grad, auto& master, const StateCodes& state) {
        sgd8_loop(terms, grad, master, state, first, part.numel);
    });
}

}  // namespace

extern const StepLevel step_level;
const StepLevel step_level = {adam_chunk, sgd_chunk, lion_chunk};
extern const State8Level state8_level;
const State8Level state8_level = {adam8_chunk, sgd8_chunk};

FP16OPT_END
