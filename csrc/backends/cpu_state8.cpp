// Steps with 8-bit state for every dtype, at one SIMD level. Compiled once for each level, like cpu.cpp.
#include "../launch/state8.h"
#include "chunk_types.h"
#include "state8_level.h"

FP16OPT_BEGIN
namespace {

template <class Grad, class Master>
uint32_t adam8_as(const StepChunk& c, Master master, const AdamTerms<Floats>& terms, const StateCodes& state) {
    adam8_loop(terms, static_cast<const Grad*>(c.grad), master, state, c.numel);
    return master.flags();
}

template <class Grad, class Master>
uint32_t sgd8_as(const StepChunk& c, Master master, const SgdTerms<Floats>& terms, const StateCodes& state, bool first) {
    const Grad* grad = static_cast<const Grad*>(c.grad);
    if (first) {
        sgd8_loop<Grad, Master, true>(terms, grad, master, state, c.numel);
    } else {
        sgd8_loop<Grad, Master, false>(terms, grad, master, state, c.numel);
    }
    return master.flags();
}

StateCodes codes_of(const State8Chunk& s) { return {s.first, s.second, s.scales, s.limit, s.dither}; }

uint32_t adam8_chunk(const StepChunk& c, const State8Chunk& s, const GradFactors& factors, const AdamScalars& scalars) {
    const AdamTerms<Floats> terms(factors, scalars, SplatFloats{});
    return step_any(c, [&](auto grad, auto master) { return adam8_as<decltype(grad)>(c, master, terms, codes_of(s)); });
}

uint32_t sgd8_chunk(const StepChunk& c, const State8Chunk& s, const GradFactors& factors, const SgdScalars& scalars) {
    const SgdTerms<Floats> terms(factors, scalars, SplatFloats{});
    const bool first = scalars.first != 0;
    return step_any(c, [&](auto grad, auto master) { return sgd8_as<decltype(grad)>(c, master, terms, codes_of(s), first); });
}

}  // namespace

extern const State8Level state8_level;
const State8Level state8_level = {adam8_chunk, sgd8_chunk};

FP16OPT_END
