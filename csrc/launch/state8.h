// The CPU loops of the steps whose state is kept in 8 bits: whole blocks of 128 elements, in two halves of 64. An incomplete
// one comes as a Tail.
#pragma once

#include "words.h"

#include "../functors/ratio8.h"

FP16OPT_BEGIN

FP16OPT_HD float largest_of(const Floats (&values)[2 * kVectors]) {
    Floats most = values[0];
    for (int k = 1; k < 2 * kVectors; ++k) most = larger(most, values[k]);
    float lanes[kWidth];
    memcpy(lanes, &most, sizeof(lanes));
    float found = lanes[0];
    for (int k = 1; k < kWidth; ++k) found = lanes[k] > found ? lanes[k] : found;
    return found;
}

// Where the state of a chunk is. `second` is null for SGD; `dither` is the first element's.
struct StateCodes {
    int8_t* first;
    uint8_t* second;
    float* scales;
    float limit;
    uint32_t dither;
};

// The block at `i`.
template <class Grad, class Master>
FP16OPT_HD void adam8_block(const AdamTerms<Floats>& terms, const Grad& grad, Master& master, const StateCodes& state,
                            Floats unit, Floats units, int64_t i) {
    float& scale = state.scales[i / kStateBlock];
    const Floats scales = splat(scale);
    Floats kept[2 * kVectors];
    const uint32_t dither = state.dither + uint32_t(i) * kIndexStride;
    for (int h = 0; h < 2; ++h) {
        const int64_t at = i + h * kBlock;
        Block g, p;
        Codes first, second, dithers;
        grad.read(at, g);
        master.read(at, p);
        get(static_cast<const int8_t*>(state.first + at), first);
        get(static_cast<const uint8_t*>(state.second + at), second);
        words_from(dither + uint32_t(h * kBlock) * kIndexStride, kIndexStride, dithers);
        // Loops of their own: what divides and takes roots waits for long, and in a chain of all of it a processor
        // finds too little else to do.
        Block m;
        Floats* const roots = kept + h * kVectors;
        for (int k = 0; k < kVectors; ++k) {
            const Floats was = root_of_code(second.v[k], scales);
            Floats v = was * was;
            m.v[k] = signed_of_code(first.v[k], was, unit);
            adam_moments(terms, g.v[k], p.v[k], m.v[k], v);
            roots[k] = root(v);
        }
        for (int k = 0; k < kVectors; ++k) {
            adam_move(terms, p.v[k], m.v[k], roots[k]);
            roots[k] = root_to_keep(roots[k]);
            first.v[k] = signed_code(m.v[k], roots[k], units, ratio_dither(dithers.v[k]));
        }
        master.write(at, p);
        store_codes(state.first + at, first);
    }
    scale = largest_of(kept);
    if (FP16OPT_UNLIKELY(!(scale >= kLeastScale))) {
        scale = 0.0f;
        memset(state.first + i, 0, kStateBlock);
        memset(state.second + i, 0, kStateBlock);
        return;
    }
    const Floats per_scale = splat(1.0f / scale);
    for (int h = 0; h < 2; ++h) {
        Codes second, dithers;
        words_from(dither + uint32_t(h * kBlock) * kIndexStride, kIndexStride, dithers);
        for (int k = 0; k < kVectors; ++k) second.v[k] = root_code(kept[h * kVectors + k], per_scale, dithers.v[k]);
        store_codes(state.second + i + h * kBlock, second);
    }
}

// What a loop reads again and again is copied first: stores of bytes may change anything that somebody has the address of.
template <class Grad, class Master>
FP16OPT_HD void adam8_loop(const AdamTerms<Floats>& terms, const Grad& grad, Master& master, const StateCodes& state,
                           int64_t n) {
    const AdamTerms<Floats> own_terms = terms;
    const StateCodes own_state = state;
    const Floats unit = splat(state.limit * kRatioUnit), units = splat(kRatios * (1.0f / state.limit));
    for (int64_t i = 0; i < n; i += kStateBlock) adam8_block(own_terms, grad, master, own_state, unit, units, i);
    master.finish();
}

template <bool kFirst, class Grad, class Master>
FP16OPT_HD void sgd8_block(const SgdTerms<Floats>& terms, const Grad& grad, Master& master, const StateCodes& state,
                           Floats unit, Floats units, int64_t i) {
    float& scale = state.scales[i / kStateBlock];
    const Floats scales = splat(kFirst ? 0.0f : scale);
    Floats magnitudes[2 * kVectors];
    Block momenta[2];
    for (int h = 0; h < 2; ++h) {
        const int64_t at = i + h * kBlock;
        Block g, p;
        Codes codes;
        grad.read(at, g);
        master.read(at, p);
        if constexpr (!kFirst) get(static_cast<const int8_t*>(state.first + at), codes);
        for (int k = 0; k < kVectors; ++k) {
            Floats momentum = g.v[k];  // any value, the first time: it is not looked at
            if constexpr (!kFirst) momentum = signed_of_code(codes.v[k], scales, unit);
            sgd<kFirst>(terms, g.v[k], p.v[k], &momentum);
            momenta[h].v[k] = momentum;
            magnitudes[h * kVectors + k] = smaller(magnitude_of(momentum, Words()), kLargestMomentum);
        }
        master.write(at, p);
    }
    scale = largest_of(magnitudes);
    if (FP16OPT_UNLIKELY(!(scale >= kLeastMomentum))) {
        scale = 0.0f;
        memset(state.first + i, 0, kStateBlock);
        return;
    }
    const Floats per = splat(scale);
    for (int h = 0; h < 2; ++h) {
        Codes codes, dithers;
        words_from(state.dither + uint32_t(i + h * kBlock) * kIndexStride, kIndexStride, dithers);
        for (int k = 0; k < kVectors; ++k) {
            codes.v[k] = signed_code(momenta[h].v[k], per, units, ratio_dither(dithers.v[k]));
        }
        store_codes(state.first + i + h * kBlock, codes);
    }
}

// `n` is a multiple of kStateBlock, as for adam8_loop.
template <bool kFirst, class Grad, class Master>
FP16OPT_HD void sgd8_loop(const SgdTerms<Floats>& terms, const Grad& grad, Master& master, const StateCodes& state,
                          int64_t n) {
    const SgdTerms<Floats> own_terms = terms;
    const StateCodes own_state = state;
    const Floats unit = splat(kRatioUnit), units = splat(kRatios);
    for (int64_t i = 0; i < n; i += kStateBlock) sgd8_block<kFirst>(own_terms, grad, master, own_state, unit, units, i);
    master.finish();
}

FP16OPT_END
