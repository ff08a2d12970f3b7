// Gradients and masters of whatever kind, eight at a time. Which kind is asked where memory is read and written, with one
// branch for eight elements: arithmetic then comes once in a kernel, and not once for each kind.
#pragma once

#include "../functors/split.h"
#include "cuda_operations.cuh"

FP16OPT_BEGIN

// Eight elements as they are stored: as many words as they need.
struct Words {
    uint32_t word[8];
};

// Loads the `valid` elements from `from` on, of 32 or of 16 bits, into the words from `first` on.
FP16OPT_HD void load_singles(Words& to, const float* from, bool aligned, int valid) {
    Eight<float> e;
    load(e, from, aligned, valid);
    FP16OPT_UNROLL
    for (int k = 0; k < kGroup; ++k) to.word[k] = bit_cast<uint32_t>(e.v[k]);
}
FP16OPT_HD void load_shorts(Words& to, int first, const Half* from, bool aligned, int valid) {
    Eight<Half> e;
    load(e, from, aligned, valid);
    FP16OPT_UNROLL
    for (int k = 0; k < kGroup / 2; ++k) to.word[first + k] = e.bytes.word[k];
}
FP16OPT_HD uint16_t short_of(const Words& words, int first, int k) {
    return uint16_t(words.word[first + k / 2] >> (k % 2 * 16));
}

FP16OPT_HD float widen_as(bool half, uint16_t bits) { return half ? widen(Half{bits}) : widen(BFloat16{bits}); }

// Gradients: of 16 bits, or unscaled before.
class Grads {
public:
    FP16OPT_HD Grads(const Lists& lists, const Chunk& chunk)
        : first_(lists.bytes_at(0, chunk)), single_(lists.dtype(0, chunk) == DType::single),
          half_(lists.dtype(0, chunk) == DType::half), aligned_(is_aligned(first_)) {}

    FP16OPT_HD void get(int i, Words& raw, int valid) const {
        if (single_) {
            load_singles(raw, reinterpret_cast<const float*>(first_) + i, aligned_, valid);
        } else {
            load_shorts(raw, 0, reinterpret_cast<const Half*>(first_) + i, aligned_, valid);
        }
    }
    FP16OPT_HD void widen_to(const Words& raw, Eight<float>& e) const {
        if (single_) {
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) e.v[k] = bit_cast<float>(raw.word[k]);
        } else {
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) e.v[k] = widen_as(half_, short_of(raw, 0, k));
        }
    }

private:
    const char* first_;
    bool single_, half_, aligned_;
};

// Masters: FP32 parameters that are their own, or FP32 beside 16-bit weights, or weights and remainders. `set` adds what
// the weights are found to be to `found`.
class Masters {
public:
    // The models' list is -1 where there are none.
    FP16OPT_HD Masters(const Lists& lists, const Chunk& chunk, int master_list, int model_list)
        : first_(lists.bytes_at(master_list, chunk)), models_(nullptr),
          split_(lists.dtype(master_list, chunk) != DType::single), half_(false), aligned_(is_aligned(first_)),
          models_aligned_(false) {
        if (model_list < 0) return;
        models_ = lists.at<Half>(model_list, chunk);
        half_ = lists.dtype(model_list, chunk) == DType::half;
        models_aligned_ = is_aligned(models_);
    }

    FP16OPT_HD void get(int i, Words& raw, int valid) const {
        if (split_) {
            load_shorts(raw, 0, models() + i, models_aligned_, valid);
            load_shorts(raw, 4, remainders() + i, aligned_, valid);
        } else {
            load_singles(raw, singles() + i, aligned_, valid);
        }
    }

    FP16OPT_HD void values(const Words& raw, Eight<float>& p) const {
        if (!split_) {
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) p.v[k] = bit_cast<float>(raw.word[k]);
        } else if (half_) {
            join_all<Half>(raw, p);
        } else {
            join_all<BFloat16>(raw, p);
        }
    }

    FP16OPT_HD void set(int i, Eight<float>& p, int valid, Found& found) const {
        if (!split_) store(p, singles() + i, aligned_, valid);
        if (models_ == nullptr) return;
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) p.v[k] = k < valid ? p.v[k] : 0.0f;  // arithmetic made anything of the padding
        if (half_) {
            set_weights<Half>(i, p, valid, found);
        } else {
            set_weights<BFloat16>(i, p, valid, found);
        }
    }

private:
    FP16OPT_HD float* singles() const { return reinterpret_cast<float*>(first_); }
    FP16OPT_HD Half* remainders() const { return reinterpret_cast<Half*>(first_); }
    FP16OPT_HD Half* models() const { return in_global_memory(models_); }  // not null here

    template <class Model>
    static FP16OPT_HD void join_all(const Words& raw, Eight<float>& p) {
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) {
            const uint16_t weight = short_of(raw, 0, k);
            p.v[k] = join(Model{}, widen(Model{weight}), weight, short_of(raw, 4, k));
        }
    }

    template <class Model>
    FP16OPT_HD void set_weights(int i, const Eight<float>& p, int valid, Found& found) const {
        Eight<Half> weights;  // bits of either dtype
        if (split_) {
            Eight<Half> rest;
            weights.clear();
            rest.clear();
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) {
                const uint16_t weight = split_weight(Model{}, p.v[k]);
                weights.set(k, Half{weight});
                rest.set(k, Half{split_remainder(Model{}, p.v[k], widen(Model{weight}), weight)});
            }
            store(rest, remainders() + i, aligned_, valid);
        } else {
            weights.bytes = narrow_eight<Model>(p).bytes;
        }
        store(weights, models() + i, models_aligned_, valid);
        if (FP16OPT_UNLIKELY(any_from(p, first_infinite<Model>()))) {
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) found.flags |= cast_flags(p.v[k], first_infinite<Model>());
        }
    }

    char* first_;
    Half* models_;
    bool split_, half_, aligned_, models_aligned_;
};

// Memory of float32.
class Singles {
public:
    FP16OPT_HD Singles(const Lists& lists, int list, const Chunk& chunk)
        : first_(lists.at<float>(list, chunk)), aligned_(is_aligned(first_)) {}
    FP16OPT_HD void get(int i, Eight<float>& e, int valid) const {
        load(e, static_cast<const float*>(first_ + i), aligned_, valid);
    }
    FP16OPT_HD void set(int i, const Eight<float>& e, int valid) const { store(e, first_ + i, aligned_, valid); }

private:
    float* first_;
    bool aligned_;
};

// Calls group(i, valid) for each of a thread's groups.
template <class Group>
FP16OPT_HD void for_each_group(int n, int thread, Group&& group) {
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (int i = thread * kGroup; i < n; i += kRow) group(i, n - i < kGroup ? n - i : kGroup);
}

FP16OPT_END
