// The CPU loops of the steps whose state is kept in 8 bits: whole blocks of 128 elements, in two halves of 64. An incomplete
// one comes as a Tail.
#pragma once

#include "words.h"

#include "../functors/ratio8.h"

FP16OPT_BEGIN

// Of numbers that are not negative, and no nans.
FP16OPT_HD float largest_of(const Floats (&values)[2 * kVectors]) {
    Floats most = values[0];
    for (int k = 1; k < 2 * kVectors; ++k) most = larger(most, values[k]);
    return largest_lane(most);
}

// What is made of the numbers of half a block: bytes. `dither` is the first element's.
#if defined(FP16OPT_AVX512) || defined(FP16OPT_AVX2)

// Bytes that are negative, zero or positive as the bits of the floats are.
FP16OPT_HD Packed packed_signs(const Floats* values) {
    const Words words[4] = {bit_cast<Words>(values[0]), bit_cast<Words>(values[1]), bit_cast<Words>(values[2]), bit_cast<Words>(values[3])};
    return packed(words);
}
// A quotient by zero is dropped below.
FP16OPT_HD Floats ratio_to_code(Floats value, Floats per) { return magnitude_of(value, Words()) / per; }

// signed_code of 64 numbers, and 0 where `per`, unless null, is 0: 127 is where packing ends by itself, of `per` as of codes.
FP16OPT_HD void code_ratios(int8_t* to, const Block& ratios, const Block& values, const Floats* per, Floats units, uint32_t dither) {
    Codes dithers;
    words_from(dither, kIndexStride, dithers);
    for (int k = 0; k < kVectors; k += 4) {
        Words steps[4];
        for (int j = 0; j < 4; ++j) steps[j] = ratio_steps(ratios.v[k + j], units, ratio_dither(dithers.v[k + j]));
        Packed codes = bytes_of(shorts_less(unsigned_shorts_of(steps[0], steps[1]), kNoSteps),
                                shorts_less(unsigned_shorts_of(steps[2], steps[3]), kNoSteps));
        if (per != nullptr) codes = smaller_bytes(codes, packed_signs(per + k));
        store_packed(to + kWidth * k, bytes_with_sign_of(codes, packed_signs(values.v + k)));
    }
}

// root_code of 64 numbers: 255 is where packing ends by itself.
FP16OPT_HD void code_roots(uint8_t* to, const Block& shares, const Floats* kept, uint32_t dither) {
    Codes dithers;
    words_from(dither, kIndexStride, dithers);
    for (int k = 0; k < kVectors; k += 4) {
        Words words[4];
        for (int j = 0; j < 4; ++j) words[j] = to_words(root_shares(shares.v[k + j], dithers.v[k + j]));
        const Packed codes = unsigned_bytes_of(shorts_of(words[0], words[1]), shorts_of(words[2], words[3]));
        store_packed(to + kWidth * k, larger_bytes(codes, smaller_bytes(packed_signs(kept + k), Packed(splat_word(0x01010101u)))));
    }
}

#else

FP16OPT_HD Floats ratio_to_code(Floats value, Floats per) { return ratio_or_zero(magnitude_of(value, Words()), per); }

FP16OPT_HD void code_ratios(int8_t* to, const Block& ratios, const Block& values, const Floats*, Floats units, uint32_t dither) {
    Codes codes;
    words_from(dither, kIndexStride, codes);
    for (int k = 0; k < kVectors; ++k) {
        codes.v[k] = signed_code(ratio_steps(ratios.v[k], units, ratio_dither(codes.v[k])), values.v[k]);
    }
    store_codes(to, codes);
}

FP16OPT_HD void code_roots(uint8_t* to, const Block& shares, const Floats* kept, uint32_t dither) {
    Codes codes;
    words_from(dither, kIndexStride, codes);
    for (int k = 0; k < kVectors; ++k) codes.v[k] = root_code(to_words(root_shares(shares.v[k], codes.v[k])), kept[k]);
    store_codes(reinterpret_cast<int8_t*>(to), codes);
}

#endif

// Where the state of a chunk is. `second` is null for SGD; `dither` is the first element's. What lies `ahead` bytes
// from codes is asked for.
struct StateCodes {
    int8_t* first;
    uint8_t* second;
    int64_t first_ahead, second_ahead;
    float* scales;
    float limit;
    uint32_t dither;
};

// A block's roots, which wait to be coded until its largest is known, and then for the next block's step.
struct Uncoded {
    Floats roots[2 * kVectors];
    Floats per_scale;
    uint8_t* to;
    uint32_t dither;

    // Roots of a half's shares of the scale, and their codes.
    FP16OPT_HD void take_shares(int half, Block& shares) const {
        for (int k = 0; k < kVectors; ++k) shares.v[k] = root(roots[half * kVectors + k] * per_scale);
    }
    FP16OPT_HD void code(int half, const Block& shares) const {
        code_roots(to + half * kBlock, shares, roots + half * kVectors, dither + uint32_t(half * kBlock) * kIndexStride);
    }
};

// The block at `i`, and the codes of the one before it; `shares` are those of the half that is coded next. With AVX-512 on Zen 4 roots
// and quotients alone take 32 cycles for 16 elements and all else 38 where nothing waits, but together they take 59: schedulers
// fill up with operations that wait. So roots and quotients lie apart: the shares of one half are taken after the other half's
// codes, and the block's largest, for whose inverse they wait, is there before masters and codes are written. Shares beside the
// moments, or the largest at the end of the block, take 3 to 7% longer. No faster, or slower: the next half's moments before this
// half's move, codes and masters of a half behind the next one's move, and one loop in which each vector goes all the way;
// and roots and quotients by fused operations from that processor's own guesses, as quick.h has them, take a fifth longer.
template <class Grad, class Master>
FP16OPT_HD void adam8_block(const AdamTerms<Floats>& terms, const Grad& grad, Master& master, const StateCodes& state,
                            Floats unit, Floats units, Uncoded& kept, Block& shares, int64_t i) {
    float& scale = state.scales[i / kStateBlock];
    const Floats scales = splat(scale);
    const uint32_t dither = state.dither + uint32_t(i) * kIndexStride;
    Floats largest = splat(0.0f);
    for (int h = 0; h < 2; ++h) {
        const int64_t at = i + h * kBlock;
        Floats* const roots = kept.roots + h * kVectors;
        Block g, p, m, v, ratios;
        Codes first, second;
        prefetch_block(state.second + at, state.second_ahead);
        prefetch_block(state.first + at, state.first_ahead);
        get(static_cast<const uint8_t*>(state.second + at), second);
        get(static_cast<const int8_t*>(state.first + at), first);
        grad.read(at, g);
        master.read(at, p);
        for (int k = 0; k < kVectors; ++k) {
            const Floats was = root_of_code(second.v[k], scales);
            m.v[k] = signed_of_code(first.v[k], was, unit);
            v.v[k] = was * was;
            adam_moments(terms, g.v[k], p.v[k], m.v[k], v.v[k]);
            v.v[k] = root(v.v[k]);
        }
        kept.code(h, shares);
        for (int k = 0; k < kVectors; ++k) {
            roots[k] = root_to_keep(v.v[k]);
            largest = larger(largest, roots[k]);
            adam_move(terms, p.v[k], m.v[k], v.v[k]);
            m.v[k] = moment_to_keep(m.v[k]);
            ratios.v[k] = ratio_to_code(m.v[k], roots[k]);
        }
        if (h == 1) {
            scale = largest_lane(largest);
            kept.per_scale = splat(1.0f / scale);
            kept.to = state.second + i;
            kept.dither = dither;
        }
        master.write(at, p);  // after the codes it takes 1 to 3% longer (AVX2, Zen 3)
        code_ratios(state.first + at, ratios, m, roots, units, dither + uint32_t(h * kBlock) * kIndexStride);
        kept.take_shares(1 - h, shares);
    }
    if (FP16OPT_UNLIKELY(!(scale >= kLeastScale))) {
        scale = 0.0f;
        kept.per_scale = splat(0.0f);
        for (Floats& root : kept.roots) root = splat(0.0f);
        kept.take_shares(0, shares);
        memset(state.first + i, 0, kStateBlock);
    }
}

// What a loop reads again and again is copied first: stores of bytes may change anything of which an address was taken.
template <class Grad, class Master>
FP16OPT_HD void adam8_loop(const AdamTerms<Floats>& terms, const Grad& grad, Master& master, const StateCodes& state,
                           int64_t n) {
    const AdamTerms<Floats> own_terms = terms;
    const StateCodes own_state = state;
    const Floats unit = splat(state.limit * kRatioUnit), units = splat(kRatios * (1.0f / state.limit));
    uint8_t nothing[kStateBlock];
    Uncoded kept = {};
    Block shares = {};
    kept.to = nothing;
    Master own_master = master;
    for (int64_t i = 0; i < n; i += kStateBlock) adam8_block(own_terms, grad, own_master, own_state, unit, units, kept, shares, i);
    master = own_master;
    for (int half = 0; half < 2; ++half) {
        kept.take_shares(half, shares);
        kept.code(half, shares);
    }
    master.finish();
}

template <class Grad, class Master>
FP16OPT_HD void sgd8_block(const SgdTerms<Floats>& terms, const Grad& grad, Master& master, const StateCodes& state,
                           bool first, Floats unit, Floats units, int64_t i) {
    float& scale = state.scales[i / kStateBlock];
    const Floats scales = splat(first ? 0.0f : scale);
    Floats magnitudes[2 * kVectors];
    Block momenta[2];
    for (int h = 0; h < 2; ++h) {
        const int64_t at = i + h * kBlock;
        Block g, p;
        Codes codes;
        grad.read(at, g);
        master.read(at, p);
        if (first) {
            momenta[h] = g;  // any value: it is not looked at
            for (int k = 0; k < kVectors; ++k) sgd<true>(terms, g.v[k], p.v[k], &momenta[h].v[k]);
        } else {
            prefetch_block(state.first + at, state.first_ahead);
            get(static_cast<const int8_t*>(state.first + at), codes);
            for (int k = 0; k < kVectors; ++k) {
                momenta[h].v[k] = signed_of_code(codes.v[k], scales, unit);
                sgd<false>(terms, g.v[k], p.v[k], &momenta[h].v[k]);
            }
        }
        for (int k = 0; k < kVectors; ++k) {
            momenta[h].v[k] = moment_to_keep(momenta[h].v[k]);
            magnitudes[h * kVectors + k] = smaller(magnitude_of(momenta[h].v[k], Words()), kLargestMomentum);
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
        Block ratios;
        for (int k = 0; k < kVectors; ++k) ratios.v[k] = ratio_to_code(momenta[h].v[k], per);
        const uint32_t dither = state.dither + uint32_t(i + h * kBlock) * kIndexStride;
        code_ratios(state.first + i + h * kBlock, ratios, momenta[h], nullptr, units, dither);
    }
}

// `n` is a multiple of kStateBlock, as for adam8_loop.
template <class Grad, class Master>
FP16OPT_HD void sgd8_loop(const SgdTerms<Floats>& terms, const Grad& grad, Master& master, const StateCodes& state,
                          bool first, int64_t n) {
    const SgdTerms<Floats> own_terms = terms;
    const StateCodes own_state = state;
    const Floats unit = splat(kRatioUnit), units = splat(kRatios);
    for (int64_t i = 0; i < n; i += kStateBlock) sgd8_block(own_terms, grad, master, own_state, first, unit, units, i);
    master.finish();
}

FP16OPT_END
