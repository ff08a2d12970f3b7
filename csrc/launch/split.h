// The CPU loops over split masters: 64 elements at a time, the last, incomplete block in padded copies.
#pragma once

#include "../functors/split.h"
#include "steps.h"

FP16OPT_BEGIN

// 64 values of 16 bits, of which the first `valid` come from memory and the others are zero.
struct Shorts {
    alignas(64) uint16_t v[kBlock];

    FP16OPT_HD Shorts() {}
    FP16OPT_HD Shorts(const void* from, int valid) {
        if (valid == kBlock) {
            memcpy(v, from, sizeof(v));
        } else {
            memset(v, 0, sizeof(v));
            memcpy(v, from, size_t(valid & (kBlock - 1)) * sizeof(uint16_t));
        }
    }
    FP16OPT_HD void copy_to(void* to, int valid) const { memcpy(to, v, size_t(valid) * sizeof(uint16_t)); }
};

// A block as single numbers, on which functors that compare and convert are vectorised by the compiler.
struct Singles {
    alignas(64) float v[kBlock];

    FP16OPT_HD explicit Singles(const Block& b) { store(v, b); }
};

// What the weights are rounded from, and their values in float32, which only float16 needs.
FP16OPT_HD void weights_of(Half, const Block& b, const Singles&, Shorts& weights) {
    Narrow narrow;
    narrow_to(Half{}, b, narrow);
    store(static_cast<void*>(weights.v), narrow, false);
}
FP16OPT_HD void weights_of(BFloat16, const Block&, const Singles& master, Shorts& weights) {
    for (int k = 0; k < kBlock; ++k) weights.v[k] = split_weight(BFloat16{}, master.v[k]);
}
FP16OPT_HD void widen_weights(Half, const Shorts& weights, Block& wide) {
    load(reinterpret_cast<const Half*>(weights.v), wide);
}
FP16OPT_HD void widen_weights(BFloat16, const Shorts&, Block& wide) { memset(&wide, 0, sizeof(wide)); }

// Masters that are kept as the model's own weights and remainders: see FullMaster.
template <class Model>
class SplitMaster {
public:
    FP16OPT_HD SplitMaster(void* model, void* remainder, int64_t first_word)
        : model_(static_cast<Model*>(model)), remainder_(static_cast<uint16_t*>(remainder)), first_word_(first_word),
          blocks_(first_word) {}

    FP16OPT_HD void read(int64_t i, int valid, Block& p) const {
        if (valid == kBlock) {
            prefetch_block(model_ + i);
            prefetch_block(remainder_ + i);
        }
        const Shorts weights(model_ + i, valid), remainders(remainder_ + i, valid);
        Block wide;
        widen_weights(Model{}, weights, wide);
        Singles joined(wide);
        for (int k = 0; k < kBlock; ++k) joined.v[k] = join(Model{}, joined.v[k], weights.v[k], remainders.v[k]);
        load(static_cast<const float*>(joined.v), p);
    }

    FP16OPT_HD void write(int64_t i, int valid, const Block& p) {
        const Singles master(p);
        if (FP16OPT_UNLIKELY(any_from(p, first_infinite<Model>()))) note(master, valid);
        Shorts weights, remainders;
        weights_of(Model{}, p, master, weights);
        Block wide;
        widen_weights(Model{}, weights, wide);
        const Singles rounded(wide);
        for (int k = 0; k < kBlock; ++k) {
            remainders.v[k] = split_remainder(Model{}, master.v[k], rounded.v[k], weights.v[k]);
        }
        weights.copy_to(model_ + i, valid);
        remainders.copy_to(remainder_ + i, valid);
        if (valid == kBlock) {
            Narrow narrow;
            load(static_cast<const void*>(weights.v), narrow);
            blocks_.add(narrow);
        } else {
            tail_hash_ = hash_tail(weights.v, valid, first_word_ + i / 4);
        }
    }

    FP16OPT_HD void finish() const {}
    FP16OPT_HD uint64_t hash() const { return blocks_.total() + tail_hash_; }
    FP16OPT_HD uint32_t flags() const { return flags_; }

private:
    FP16OPT_NOINLINE void note(const Singles& master, int valid) {
        for (int k = 0; k < valid; ++k) flags_ |= cast_flags(master.v[k], first_infinite<Model>());
    }

    Model* model_;
    uint16_t* remainder_;
    int64_t first_word_;
    BlockHash blocks_;
    uint64_t tail_hash_ = 0;
    uint32_t flags_ = 0;
};

template <class Model>
FP16OPT_HD void join_loop(const SplitMaster<Model>& from, float* out, int64_t n) {
    for_blocks(n, [&](int64_t i, int valid) {
        Block p;
        from.read(i, valid, p);
        set(out + i, valid, p);
    });
}

template <class Model>
FP16OPT_HD void split_loop(const float* master, SplitMaster<Model>& to, int64_t n) {
    for_blocks(n, [&](int64_t i, int valid) {
        Block p;
        get(master + i, valid, p);
        to.write(i, valid, p);
    });
}

FP16OPT_END
