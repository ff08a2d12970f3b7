// Gradients and masters of whatever kind, eight at a time. Which kind is asked where memory is read and written, with one
// branch for eight elements: arithmetic then comes once in a kernel, and not once for each kind.
#pragma once

#include "../functors/split24.h"
#include "cuda_operations.cuh"

FP16OPT_BEGIN

// Eight elements as they are stored: as many words as they need.
struct Words {
    uint32_t word[8];
};

// Loads the `left` elements from `from` on, of 32 or of 16 bits, into the words from `first` on.
FP16OPT_HD void load_singles(Words& to, const float* from, bool aligned, int left) {
    Eight<float> e;
    load(e, from, aligned, left);
    FP16OPT_UNROLL
    for (int k = 0; k < kGroup; ++k) to.word[k] = bit_cast<uint32_t>(e.v[k]);
}
FP16OPT_HD void load_shorts(Words& to, int first, const Half* from, bool aligned, int left) {
    Eight<Half> e;
    load(e, from, aligned, left);
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

    FP16OPT_HD void get(int i, Words& raw, int left) const {
        if (single_) {
            load_singles(raw, reinterpret_cast<const float*>(first_) + i, aligned_, left);
        } else {
            load_shorts(raw, 0, reinterpret_cast<const Half*>(first_) + i, aligned_, left);
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

// Masters: FP32 parameters that are their own, or FP32 beside 16-bit weights, or weights and remainders of 16 or of 8 bits.
// `set` adds what the weights are found to be to `found`.
class Masters {
public:
    // The models' list is -1 where there are none. `number` is the step's, by which masters in 24 bits are rounded.
    FP16OPT_HD Masters(const Lists& lists, const Chunk& chunk, int master_list, int model_list, uint32_t number = 0)
        : first_(lists.bytes_at(master_list, chunk)), models_(nullptr), dither_(master_dither_at(chunk.index, number)),
          split_(lists.dtype(master_list, chunk) != DType::single),
          bytes_(lists.dtype(master_list, chunk) == DType::byte), half_(false), aligned_(is_aligned(first_)),
          models_aligned_(false) {
        if (model_list < 0) return;
        models_ = lists.at<Half>(model_list, chunk);
        half_ = lists.dtype(model_list, chunk) == DType::half;
        models_aligned_ = is_aligned(models_);
    }

    FP16OPT_HD void get(int i, Words& raw, int left) const {
        if (split_) {
            load_shorts(raw, 0, models() + i, models_aligned_, left);
            if (bytes_) {
                Eight<uint8_t> rest;
                load(rest, static_cast<const uint8_t*>(byte_remainders() + i), aligned_, left);
                raw.word[4] = rest.word[0];
                raw.word[5] = rest.word[1];
            } else {
                load_shorts(raw, 4, remainders() + i, aligned_, left);
            }
        } else {
            load_singles(raw, singles() + i, aligned_, left);
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

    // kNearest: without the dither, as outside of steps.
    template <bool kNearest = false>
    FP16OPT_HD void set(int i, Eight<float>& p, int left, const ChunkMarks& marks, Found& found) const {
        if (!split_) store(p, singles() + i, aligned_, left);
        if (models_ == nullptr) return;
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) p.v[k] = k < left ? p.v[k] : 0.0f;  // arithmetic made anything of the padding
        Eight<Half> weights, rest;  // bits of any dtype: of remainders in one byte the lower half
        weights.clear();
        rest.clear();
        if (half_) {
            make<Half, kNearest>(i, p, weights, rest, found);
        } else {
            make<BFloat16, kNearest>(i, p, weights, rest, found);
        }
        if (bytes_) {
            store(Eight<uint8_t>{{rest.bytes.word[0], rest.bytes.word[1]}}, byte_remainders() + i, aligned_, left);
        } else if (split_) {
            store(rest, remainders() + i, aligned_, left);
        }
        marks.note(i, static_cast<const Half*>(models()), models_aligned_, weights, left, found);
        store(weights, models() + i, models_aligned_, left);
    }

private:
    FP16OPT_HD float* singles() const { return reinterpret_cast<float*>(first_); }
    FP16OPT_HD Half* remainders() const { return reinterpret_cast<Half*>(first_); }
    FP16OPT_HD uint8_t* byte_remainders() const { return reinterpret_cast<uint8_t*>(first_); }
    FP16OPT_HD Half* models() const { return in_global_memory(models_); }  // not null here

    template <class Model>
    FP16OPT_HD void join_all(const Words& raw, Eight<float>& p) const {
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) {
            const uint16_t weight = short_of(raw, 0, k);
            p.v[k] = bytes_ ? join24(Model{}, weight, uint8_t(raw.word[4 + k / 4] >> (k % 4 * 8)))
                            : join(Model{}, widen(Model{weight}), weight, short_of(raw, 4, k));
        }
    }

    // Weights and remainders of masters; both are clear before.
    template <class Model, bool kNearest>
    FP16OPT_HD void make(int i, const Eight<float>& p, Eight<Half>& weights, Eight<Half>& rest, Found& found) const {
        if (bytes_) {
            Eight<uint8_t> bytes;
            bytes.clear();
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) {
                const uint32_t dither = kNearest ? nearest_dither(p.v[k]) : dither_ + uint32_t(i + k) * kMasterIndexStride;
                const Parts24 parts = split24(Model{}, p.v[k], dither);
                weights.set(k, Half{parts.weight});
                bytes.set(k, parts.remainder);
            }
            rest.bytes.word[0] = bytes.word[0];
            rest.bytes.word[1] = bytes.word[1];
        } else if (split_) {
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) {
                const uint16_t weight = split_weight(Model{}, p.v[k]);
                weights.set(k, Half{weight});
                rest.set(k, Half{split_remainder(Model{}, p.v[k], widen(Model{weight}), weight)});
            }
        } else {
            weights.bytes = narrow_eight<Model>(p).bytes;
        }
        if (FP16OPT_UNLIKELY(any_from(p, first_infinite<Model>()))) {
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) found.flags |= cast_flags(p.v[k], first_infinite<Model>());
        }
    }

    char* first_;
    Half* models_;
    uint32_t dither_;
    bool split_, bytes_, half_, aligned_, models_aligned_;
};

// Memory of float32.
class Singles {
public:
    FP16OPT_HD Singles(const Lists& lists, int list, const Chunk& chunk)
        : first_(lists.at<float>(list, chunk)), aligned_(is_aligned(first_)) {}
    FP16OPT_HD void get(int i, Eight<float>& e, int left) const {
        load(e, static_cast<const float*>(first_ + i), aligned_, left);
    }
    template <bool kWhole = false>
    FP16OPT_HD void set(int i, const Eight<float>& e, int left) const {
        store<kWhole>(e, first_ + i, aligned_, left);
    }

private:
    float* first_;
    bool aligned_;
};

// Calls group(i, left) for each of a thread's groups: there are `left` elements from the chunk's i-th on.
template <class Group>
FP16OPT_HD void for_each_group(int n, int thread, Group&& group) {
    FP16OPT_ROLLED
    for (int i = thread * kGroup; i < n; i += kRow) group(i, n - i);
}

FP16OPT_END
