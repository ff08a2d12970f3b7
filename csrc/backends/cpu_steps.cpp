// The one-pass steps for every dtype, at one SIMD level. Compiled once for each level, as cpu.cpp is.
#include "../launch/held.h"
#include "chunk_types.h"
#include "held_level.h"
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

// -- gradients in 8 bits -----------------------------------------------------------------------------------------------

void encode_chunk(DType from, const void* grad, void* codes, float* scales, uint32_t index, int64_t n) {
    const char* const grads = static_cast<const char*>(grad);
    int8_t* const made = static_cast<int8_t*>(codes);
    const int64_t rest = n % kHeldBlock, whole = n - rest;
    encode_blocks(from, grads, made, scales, index, whole);
    if (rest == 0) return;
    char padded[kHeldBlock * sizeof(float)] = {};
    int8_t last[kHeldBlock];
    memcpy(padded, grads + whole * item_size(from), size_t(rest * item_size(from)));
    encode_blocks(from, padded, last, scales + whole / kHeldBlock, index + uint32_t(whole), kHeldBlock);
    memcpy(made + whole, last, size_t(rest));
}

void decode_chunk(DType to, const void* codes, const float* scales, void* out, int64_t n) {
    const int8_t* const from = static_cast<const int8_t*>(codes);
    char* const outs = static_cast<char*>(out);
    const int64_t rest = n % kBlock, whole = n - rest;
    decode_blocks(to, from, scales, outs, whole);
    if (rest == 0) return;
    int8_t padded[kBlock] = {};
    char last[kBlock * sizeof(float)];
    memcpy(padded, from + whole, size_t(rest));
    decode_blocks(to, padded, scales + whole / kHeldBlock, last, kBlock);
    memcpy(outs + whole * item_size(to), last, size_t(rest * item_size(to)));
}

}  // namespace

extern const StepLevel step_level;
#define FP16OPT_ENTRY(F) step_chunk<F>,
constexpr StepOfChunk kSteps[] = {FP16OPT_FORMULAS(FP16OPT_ENTRY)};
const StepLevel step_level = {kSteps};
#undef FP16OPT_ENTRY
extern const State8Level state8_level;
const State8Level state8_level = {adam8_chunk, sgd8_chunk};
extern const HeldLevel held_level;
const HeldLevel held_level = {encode_chunk, decode_chunk};

FP16OPT_END
