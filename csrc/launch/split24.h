// Masters that are kept as the model's own weights and 8-bit remainders, for the CPU loops: see FullMaster in steps.h.
#pragma once

#include "words.h"

#include "../functors/split24.h"

FP16OPT_BEGIN

constexpr uint32_t kLeastHalfExponent = 113u << 23;  // float32's, of the smallest normal half; subnormals have its step

FP16OPT_HD Words step_exponents(Floats wide) {
    return larger_word(bit_cast<Words>(wide) & 0x7f800000u, splat_word(kLeastHalfExponent));
}

// False where a weight isn't finite: the master is another one then.
FP16OPT_HD bool join24_finite(const Half* weights, const Codes& remainders, Block& p) {
    load(weights, p);
    for (int k = 0; k < kVectors; ++k) {
        const Floats step = bit_cast<Floats>(step_exponents(p.v[k]) - ((18u + 24u) << 23));
        p.v[k] = master_of(steps_added(p.v[k], to_floats(remainders.v[k]), step), p.v[k]);
    }
    return !any_from(p, kInfinity);
}
// Of bfloat16 a master is weight and remainder as one integer, infinite or not.
FP16OPT_HD bool join24_finite(const BFloat16* weights, const Codes& remainders, Block& p) {
    load(weights, p);
    for (int k = 0; k < kVectors; ++k) {
        p.v[k] = master_of(bit_cast<Floats>(bit_cast<Words>(p.v[k]) + upper_half(remainders.v[k])), p.v[k]);
    }
    return true;
}

FP16OPT_HD void split24_finite(const Block& p, Half* weights, int8_t* remainders, uint32_t) {
    Codes steps;
    for (int k = 0; k < kVectors; ++k) {
        const Floats wide = store_rounded(weights + kWidth * k, p.v[k]);
        const Floats per_one = bit_cast<Floats>((272u << 23) - step_exponents(wide));
        steps.v[k] = nearest_words(steps_away(p.v[k], wide, per_one));
    }
    store_clamped(remainders, steps);
}
FP16OPT_HD void split24_finite(const Block& p, BFloat16* weights, int8_t* remainders, uint32_t dither) {
    Codes codes;
    words_from(dither, kMasterIndexStride, codes);
    Block rounded;
    for (int k = 0; k < kVectors; ++k) {
        const Words bits = dithered_bits(bit_cast<Words>(p.v[k]), codes.v[k]);
        codes.v[k] = second_byte(bits);
        rounded.v[k] = bit_cast<Floats>(bits);
    }
    Narrow narrow;
    narrow_away(rounded, narrow);
    store(static_cast<void*>(weights), narrow, false);
    store_codes(remainders, codes);
}

template <class Weight>
class Split24Master {
public:
    typedef Weight Model;

    FP16OPT_HD Split24Master(void* model, void* remainder, uint32_t dither, int64_t model_ahead, int64_t ahead)
        : model_(static_cast<Model*>(model)), remainder_(static_cast<int8_t*>(remainder)), model_ahead_(model_ahead),
          ahead_(ahead), dither_(dither) {}

    FP16OPT_HD void read(int64_t i, Block& p) const {
        Codes remainders;
        prefetch_block(model_ + i, model_ahead_);
        prefetch_block(remainder_ + i, ahead_);
        get(static_cast<const int8_t*>(remainder_ + i), remainders);
        if (FP16OPT_UNLIKELY(!join24_finite(static_cast<const Model*>(model_ + i), remainders, p))) {
            read_special(model_ + i, remainder_ + i, p);
        }
    }

    FP16OPT_HD void write(int64_t i, const Block& p) {
        const uint32_t dither = dither_ + uint32_t(i) * kMasterIndexStride;
        if (FP16OPT_UNLIKELY(any_from(p, first_infinite<Model>()))) {
            flags_ |= write_special(p, model_ + i, remainder_ + i, dither);
        } else {
            split24_finite(p, model_ + i, remainder_ + i, dither);
        }
    }

    FP16OPT_HD void finish() const {}
    FP16OPT_HD uint32_t flags() const { return flags_; }

private:
    // Without `this`, as SplitMaster's.
    FP16OPT_NOINLINE static void read_special(const Model* model, const int8_t* remainder, Block& p) {
        float joined[kBlock];
        for (int k = 0; k < kBlock; ++k) joined[k] = join24(Model{}, model[k].bits, uint8_t(remainder[k]));
        load(static_cast<const float*>(joined), p);
    }
    // Gives back the flags of what it wrote.
    FP16OPT_NOINLINE static uint32_t write_special(const Block& p, Model* model, int8_t* remainder, uint32_t dither) {
        float master[kBlock];
        uint32_t flags = 0;
        store(master, p);
        for (int k = 0; k < kBlock; ++k) {
            const Parts24 parts = split24(Model{}, master[k], dither + uint32_t(k) * kMasterIndexStride);
            model[k].bits = parts.weight;
            remainder[k] = int8_t(parts.remainder);
            flags |= cast_flags(master[k], first_infinite<Model>());
        }
        return flags;
    }

    Model* model_;
    int8_t* remainder_;
    int64_t model_ahead_, ahead_;
    uint32_t dither_;
    uint32_t flags_ = 0;
};

FP16OPT_END
