// The one-pass steps for every dtype, at one SIMD level. Compiled once for each level, as cpu.cpp is.
#include "../launch/state8.h"
#include "chunk_types.h"
#include "state8_level.h"

FP16OPT_BEGIN
namespace {

// Calls step(part, master) for the whole blocks of a chunk, and for what is left.
template <class Step>
uint32_t for_steps(const StepChunk& c, Step&& step) {
    return for_whole_blocks(c, kBlock, int(sizeof(float)), true, [&](const StepChunk& part, int64_t) {
        return step_any(part, [&](const auto& grad, auto& master) { step(part, grad, master); });
    });
}

template <class F>
uint32_t step_chunk(const StepChunk& c, const GradFactors& factors, const void* scalars, bool first) {
    const typename F::template Terms<Floats> terms(factors, *static_cast<const typename F::Scalars*>(scalars), SplatFloats{});
    return for_steps(c, [&](const StepChunk& part, const auto& grad, auto& master) {
        float* const state[] = {static_cast<float*>(part.state[0]), static_cast<float*>(part.state[1]), static_cast<float*>(part.state[2])};
        step_loop<F>(terms, grad, master, part.states, first, state, part.ahead.state, part.numel);
    });
}

// -- with 8-bit state --------------------------------------------------------------------------------------------------

// Calls step(part, master, state) for the whole blocks of a chunk, and for what is left.
template <class Step>
uint32_t for_steps(const StepChunk& c, const State8Chunk& s, Step&& step) {
    return for_whole_blocks(c, kStateBlock, 1, false, [&](const StepChunk& part, int64_t start) {
        const StateCodes state{static_cast<int8_t*>(part.state[0]), static_cast<uint8_t*>(part.state[1]),
                               part.ahead.state[0], part.ahead.state[1], s.scales + start / kStateBlock, s.limit,
                               s.dither + uint32_t(start) * kIndexStride};
        return step_any(part, [&](const auto& grad, auto& master) { step(part, grad, master, state); });
    });
}

uint32_t adam8_chunk(const StepChunk& c, const State8Chunk& s, const GradFactors& factors, const void* scalars) {
    const AdamTerms<Floats> terms(factors, *static_cast<const AdamScalars*>(scalars), SplatFloats{});
    return for_steps(c, s, [&](const StepChunk& part, const auto& grad, auto& master, const StateCodes& state) {
        adam8_loop(terms, grad, master, state, part.numel);
    });
}

uint32_t sgd8_chunk(const StepChunk& c, const State8Chunk& s, const GradFactors& factors, const void* scalars, bool first) {
    const SgdTerms<Floats> terms(factors, *static_cast<const SgdScalars*>(scalars), SplatFloats{});
    return for_steps(c, s, [&](const StepChunk& part, const auto& grad, auto& master, const StateCodes& state) {
        sgd8_loop(terms, grad, master, state, first, part.numel);
    });
}

}  // namespace

extern const StepLevel step_level;
#define FP16OPT_ENTRY(F) step_chunk<F>,
constexpr StepOfChunk kSteps[] = {FP16OPT_FORMULAS(FP16OPT_ENTRY)};
const StepLevel step_level = {kSteps};
#undef FP16OPT_ENTRY
extern const State8Level state8_level;
const State8Level state8_level = {adam8_chunk, sgd8_chunk};

FP16OPT_END
