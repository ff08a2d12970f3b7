// The CPU loops of the steps whose state is kept in 8 bits: a block of 128 elements at a time, in two halves of 64. As in
// launch/steps.h the last, incomplete block goes through the same code in padded copies.
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

// How many elements of half `h` there are, of a block with `left` from its beginning on; kFull says that it is whole.
template <bool kFull>
FP16OPT_HD int valid_in(int h, int64_t left) {
    if (kFull) return kBlock;
    const int64_t there = left - h * kBlock;
    return there <= 0 ? 0 : there < kBlock ? int(there) : kBlock;
}

// The block at `i`, with `left` elements from there on.
template <bool kFull, class Grad, class Master>
FP16OPT_HD void adam8_block(const AdamTerms<Floats>& terms, const Grad* grad, Master& master, const StateCodes& state,
                            Floats unit, Floats units, int64_t i, int64_t left) {
    float& scale = state.scales[i / kStateBlock];
    const Floats scales = splat(scale);
    Floats kept[2 * kVectors];
    const uint32_t dither = state.dither + uint32_t(i) * kIndexStride;
    for (int h = 0; h < 2; ++h) {
        const int valid = valid_in<kFull>(h, left);
        const int64_t at = i + h * kBlock;
        if (!kFull && valid == 0) {
            for (int k = 0; k < kVectors; ++k) kept[h * kVectors + k] = splat(0.0f);
            continue;
        }
        Block g, p;
        Codes first, second, dithers;
        get(grad + at, valid, g);
        master.read(at, valid, p);
        get(static_cast<const int8_t*>(state.first + at), valid, first);
        get(static_cast<const uint8_t*>(state.second + at), valid, second);
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
        master.write(at, valid, p);
        set(state.first + at, valid, first);
    }
    scale = largest_of(kept);
    if (FP16OPT_UNLIKELY(!(scale >= kLeastScale))) {
        scale = 0.0f;
        const size_t valid = size_t(left < kStateBlock ? left : kStateBlock);
        memset(state.first + i, 0, valid);
        memset(state.second + i, 0, valid);
        return;
    }
    const Floats per_scale = splat(1.0f / scale);
    for (int h = 0; h < 2; ++h) {
        const int valid = valid_in<kFull>(h, left);
        if (!kFull && valid == 0) break;
        Codes second, dithers;
        words_from(dither + uint32_t(h * kBlock) * kIndexStride, kIndexStride, dithers);
        for (int k = 0; k < kVectors; ++k) second.v[k] = root_code(kept[h * kVectors + k], per_scale, dithers.v[k]);
        set(state.second + i + h * kBlock, valid, second);
    }
}

// What a loop reads again and again is copied first: stores of bytes may change anything that somebody has the address of.
template <class Grad, class Master>
FP16OPT_HD void adam8_loop(const AdamTerms<Floats>& terms, const Grad* grad, Master& master, const StateCodes& state,
                           int64_t n) {
    const AdamTerms<Floats> own_terms = terms;
    const StateCodes own_state = state;
    const Floats unit = splat(state.limit * kRatioUnit), units = splat(kRatios * (1.0f / state.limit));
    int64_t i = 0;
    for (; i + kStateBlock <= n; i += kStateBlock) {
        adam8_block<true>(own_terms, grad, master, own_state, unit, units, i, n - i);
    }
    if (i < n) adam8_block<false>(own_terms, grad, master, own_state, unit, units, i, n - i);
    master.finish();
}

template <bool kFirst, bool kFull, class Grad, class Master>
FP16OPT_HD void sgd8_block(const SgdTerms<Floats>& terms, const Grad* grad, Master& master, const StateCodes& state,
                           Floats unit, Floats units, int64_t i, int64_t left) {
    float& scale = state.scales[i / kStateBlock];
    const Floats scales = splat(kFirst ? 0.0f : scale);
    Floats magnitudes[2 * kVectors];
    Block momenta[2];
    for (int h = 0; h < 2; ++h) {
        const int valid = valid_in<kFull>(h, left);
        const int64_t at = i + h * kBlock;
        if (!kFull && valid == 0) {
            for (int k = 0; k < kVectors; ++k) magnitudes[h * kVectors + k] = splat(0.0f);
            continue;
        }
        Block g, p;
        Codes codes;
        get(grad + at, valid, g);
        master.read(at, valid, p);
        if constexpr (!kFirst) get(static_cast<const int8_t*>(state.first + at), valid, codes);
        for (int k = 0; k < kVectors; ++k) {
            Floats momentum = g.v[k];  // any value, the first time: it is not looked at
            if constexpr (!kFirst) momentum = signed_of_code(codes.v[k], scales, unit);
            sgd<kFirst>(terms, g.v[k], p.v[k], &momentum);
            momenta[h].v[k] = momentum;
            magnitudes[h * kVectors + k] = smaller(magnitude_of(momentum, Words()), kLargestMomentum);
        }
        master.write(at, valid, p);
    }
    scale = largest_of(magnitudes);
    if (FP16OPT_UNLIKELY(!(scale >= kLeastMomentum))) {
        scale = 0.0f;
        memset(state.first + i, 0, size_t(left < kStateBlock ? left : kStateBlock));
        return;
    }
    const Floats per = splat(scale);
    for (int h = 0; h < 2; ++h) {
        const int valid = valid_in<kFull>(h, left);
        if (!kFull && valid == 0) break;
        Codes codes, dithers;
        words_from(state.dither + uint32_t(i + h * kBlock) * kIndexStride, kIndexStride, dithers);
        for (int k = 0; k < kVectors; ++k) {
            codes.v[k] = signed_code(momenta[h].v[k], per, units, ratio_dither(dithers.v[k]));
        }
        set(state.first + i + h * kBlock, valid, codes);
    }
}

template <class Grad, class Master, bool kFirst>
FP16OPT_HD void sgd8_loop(const SgdTerms<Floats>& terms, const Grad* grad, Master& master, const StateCodes& state,
                          int64_t n) {
    const SgdTerms<Floats> own_terms = terms;
    const StateCodes own_state = state;
    const Floats unit = splat(kRatioUnit), units = splat(kRatios);
    int64_t i = 0;
    for (; i + kStateBlock <= n; i += kStateBlock) {
        sgd8_block<kFirst, true>(own_terms, grad, master, own_state, unit, units, i, n - i);
    }
    if (i < n) sgd8_block<kFirst, false>(own_terms, grad, master, own_state, unit, units, i, n - i);
    master.finish();
}

FP16OPT_END
