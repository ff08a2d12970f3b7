// Gradients and masters of whatever kind, eight at a time. Which kind is asked where memory is read and written, with one
// branch for eight elements: arithmetic then comes once in a kernel, and not once for each kind.
#pragma once

#include "../functors/quick.h"
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

// What a kernel is compiled for: gradients and masters of any kind, which the table tells for each tensor, ...
struct AnyKind {
    static constexpr bool is_one = false, is_half = false, is_split = false, has_bytes = false;
};
// ... or weights of one type, gradients like them, and masters of float, or remainders of uint16_t or uint8_t.
template <class Weight, class Beside>
struct OneKind {
    typedef Weight Model;
    static constexpr bool is_one = true, is_half = kIsHalf<Weight>, is_split = sizeof(Beside) < sizeof(float),
                          has_bytes = sizeof(Beside) == 1;
};

// Gradients: of 16 bits, or unscaled before.
template <class Kind>
class GradsOf {
public:
    FP16OPT_HD GradsOf(const Lists& lists, const Chunk& chunk)
        : first_(lists.bytes_at(0, chunk)), single_(lists.dtype(0, chunk) == DType::single),
          half_(lists.dtype(0, chunk) == DType::half), aligned_(is_aligned(first_)) {}

    FP16OPT_HD bool aligned() const { return aligned_; }

    // kWhole: there are eight, and `aligned` is known to be true.
    template <bool kWhole = false>
    FP16OPT_HD void get(int i, Words& raw, int left) const {
        if (single()) {
            load_singles(raw, reinterpret_cast<const float*>(first()) + i, kWhole || aligned_, left);
        } else {
            load_shorts(raw, 0, reinterpret_cast<const Half*>(first()) + i, kWhole || aligned_, left);
        }
    }
    // The k-th of them.
    FP16OPT_HD float value(const Words& raw, int k) const {
        return single() ? bit_cast<float>(raw.word[k]) : widen_as(half(), short_of(raw, 0, k));
    }
    FP16OPT_HD void widen_to(const Words& raw, Eight<float>& e) const {
        if (single()) {
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) e.v[k] = bit_cast<float>(raw.word[k]);
        } else {
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) e.v[k] = widen_as(half(), short_of(raw, 0, k));
        }
    }

private:
    FP16OPT_HD const char* first() const { return in_global_memory(first_); }
    FP16OPT_HD bool single() const { return !Kind::is_one && single_; }
    FP16OPT_HD bool half() const { return Kind::is_one ? Kind::is_half : half_; }

    const char* first_;
    bool single_, half_, aligned_;
};
typedef GradsOf<AnyKind> Grads;

// Masters: FP32 parameters that are their own, or FP32 beside 16-bit weights, or weights and remainders of 16 or of 8 bits.
// `set` adds what the weights are found to be to `found`.
template <class Kind>
class MastersOf {
public:
    // The models' list is -1 where there are none. `number` is the step's, by which masters in 24 bits are rounded.
    FP16OPT_HD MastersOf(const Lists& lists, const Chunk& chunk, int master_list, int model_list, uint32_t number = 0)
        : first_(lists.bytes_at(master_list, chunk)), models_(nullptr), dither_(master_dither_at(chunk.index, number)),
          split_(lists.dtype(master_list, chunk) != DType::single),
          bytes_(lists.dtype(master_list, chunk) == DType::byte), half_(false), aligned_(is_aligned(first_)),
          models_aligned_(false) {
        if (model_list < 0) return;
        models_ = lists.at<Half>(model_list, chunk);
        half_ = lists.dtype(model_list, chunk) == DType::half;
        models_aligned_ = is_aligned(models_);
    }

    template <bool kWhole = false>  // as of gradients
    FP16OPT_HD void get(int i, Words& raw, int left) const {
        if (split()) {
            load_shorts(raw, 0, models() + i, kWhole || models_aligned_, left);
            if (bytes()) {
                Eight<uint8_t> rest;
                load(rest, static_cast<const uint8_t*>(byte_remainders() + i), kWhole || aligned_, left);
                raw.word[4] = rest.word[0];
                raw.word[5] = rest.word[1];
            } else {
                load_shorts(raw, 4, remainders() + i, kWhole || aligned_, left);
            }
        } else {
            load_singles(raw, singles() + i, kWhole || aligned_, left);
        }
    }

    FP16OPT_HD void values(const Words& raw, Eight<float>& p) const {
        if (!split()) {
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) p.v[k] = bit_cast<float>(raw.word[k]);
        } else if (half()) {
            join_all<Half>(raw, p);
        } else {
            join_all<BFloat16>(raw, p);
        }
    }

    // kNearest: without the dither, as outside of steps.
    template <bool kNearest = false, bool kWhole = false>
    FP16OPT_HD void set(int i, Eight<float>& p, int left, const ChunkMarks& marks, Found& found) const {
        const bool aligned = kWhole || aligned_, models_aligned = kWhole || models_aligned_;
        if (!split()) store<kWhole>(p, singles() + i, aligned, left);
        if (!Kind::is_one && models_ == nullptr) return;
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) p.v[k] = k < left ? p.v[k] : 0.0f;  // arithmetic made anything of the padding
        Eight<Half> weights, rest;  // bits of any dtype: of remainders in one byte the lower half
        weights.clear();
        rest.clear();
        if (half()) {
            make<Half, kNearest>(i, p, weights, rest, found);
        } else {
            make<BFloat16, kNearest>(i, p, weights, rest, found);
        }
        if (bytes()) {
            store(Eight<uint8_t>{{rest.bytes.word[0], rest.bytes.word[1]}}, byte_remainders() + i, aligned, left);
        } else if (split()) {
            store<kWhole>(rest, remainders() + i, aligned, left);
        }
        marks.note(i, static_cast<const Half*>(models()), models_aligned, weights, left, found);
        store<kWhole>(weights, models() + i, models_aligned, left);
    }

    // -- of eight elements, where all lists are aligned, by a kernel that knows their kind: with fewer instructions for masters
    // that are as most are. False where one is not: then nothing of it counts, and the operations above serve.
    FP16OPT_HD bool aligned() const { return aligned_ && (models_aligned_ || models_ == nullptr); }

    // The k-th master, of a weight that is not zero; of infinities, nans, and bfloat16's zeros, a nan. `p` has the values where
    // the kernel does not know the kind.
    FP16OPT_HD float quick_value(const Words& raw, const Eight<float>& p, int k, bool& fits) const {
        if constexpr (!Kind::is_one) {
            return p.v[k];
        } else if constexpr (!Kind::is_split) {
            return bit_cast<float>(raw.word[k]);
        } else {
            const float wide = widen(typename Kind::Model{short_of(raw, 0, k)});
            if constexpr (Kind::is_half) {
                fits &= wide != 0.0f;
                return fused(quick_steps(raw, k), bit_cast<float>(step_bits(wide)), wide);
            } else {
                const uint32_t rest = Kind::has_bytes ? uint32_t(int32_t(int8_t(raw.word[4 + k / 4] >> (k % 4 * 8)))) << 8
                                                      : uint32_t(int32_t(int16_t(short_of(raw, 4, k))));
                return bit_cast<float>(bit_cast<uint32_t>(wide) + rest);
            }
        }
    }

    // What quick_make makes.
    struct Made {
        Eight<Half> weights;
        uint32_t rest[Kind::has_bytes ? 2 : 4];
    };
    // Of masters that are no nans, and not as small as those that a sign may change of.
    FP16OPT_HD bool quick_make(int i, const Eight<float>& p, Made& made) const {
        if constexpr (!Kind::is_one) {
            return true;
        } else {
            bool fits = true;
            uint32_t weight_before = 0, rest_before = 0;
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) {
                uint32_t weight, rest = 0;
                const float magnitude = bit_cast<float>(bit_cast<uint32_t>(p.v[k]) & 0x7fffffffu);
                fits &= magnitude < bit_cast<float>(first_infinite<typename Kind::Model>());
                if constexpr (!Kind::is_split) {
                    weight = narrow<typename Kind::Model>(p.v[k]).bits;
                } else if constexpr (Kind::is_half) {
                    weight = float_to_half(p.v[k]);
                    const float wide = half_to_float(uint16_t(weight));
                    const uint32_t per_one = ((Kind::has_bytes ? 272u : 280u) << 23) - step_bits(wide);
                    const float away = steps_away(p.v[k], wide, bit_cast<float>(per_one));
                    const float steps = bit_cast<float>(bit_cast<uint32_t>(away) & 0x7fffffffu);
                    fits &= steps < (Kind::has_bytes ? kMostSteps24 : kMostSteps) + 0.5f;
                    rest = bit_cast<uint32_t>(away + kRounder);  // in its lower bits
                } else {
                    rest = bit_cast<uint32_t>(p.v[k]);
                    if (Kind::has_bytes) rest = dithered_bits(rest, dither_ + uint32_t(i + k) * kMasterIndexStride);
                    weight = rest + 0x8000u;  // in its upper half
                    if (Kind::has_bytes) rest >>= 8;
                }
                if (k % 2 == 1) {
                    made.weights.bytes.word[k / 2] = Kind::is_half || !Kind::is_split ? lower_halves(weight_before, weight)
                                                                                       : upper_halves(weight_before, weight);
                    if (Kind::is_split && !Kind::has_bytes) made.rest[k / 2] = lower_halves(rest_before, rest);
                }
                if (Kind::has_bytes) put_byte(made.rest, k, rest);
                weight_before = weight;
                rest_before = rest;
            }
            return fits;
        }
    }
    FP16OPT_HD void quick_set(int i, Eight<float>& p, const Made& made, const ChunkMarks& marks, Found& found) const {
        if constexpr (Kind::is_one) {
            marks.note(i, static_cast<const Half*>(models()), true, made.weights, kGroup, found);
            if constexpr (!Kind::is_split) {
                p.store(singles() + i);
            } else if constexpr (Kind::has_bytes) {
                Eight<uint8_t>{{made.rest[0], made.rest[1]}}.store(byte_remainders() + i);
            } else {
                store16(remainders() + i, Bytes16{{made.rest[0], made.rest[1], made.rest[2], made.rest[3]}});
            }
            made.weights.store(models() + i);
        }
    }

private:
    // The exponent of a float16's last place, times 2^10: subnormals have that of the smallest normal one.
    static FP16OPT_HD uint32_t step_bits(float wide) { return larger_word(bit_cast<uint32_t>(wide) & 0x7f800000u, 113u << 23); }
    // The remainder of the k-th, in steps times 2^-26 or 2^-18, as step_bits has them: an offset makes it positive, and it is then
    // the mantissa of a power of two.
    static FP16OPT_HD float quick_steps(const Words& raw, int k) {
        if constexpr (Kind::has_bytes) {
            return bit_cast<float>(permuted(raw.word[4 + k / 4] ^ 0x80808080u, 0x42000000u, 0x7440u | uint32_t(k % 4))) - (0x1p5f + 0x1p-11f);
        } else {
            const uint32_t which = k % 2 == 0 ? 0x7610u : 0x7632u;
            return bit_cast<float>(permuted(raw.word[4 + k / 2] ^ 0x80008000u, 0x3e000000u, which)) - (0x1p-3f + 0x1p-11f);
        }
    }

    FP16OPT_HD bool split() const { return Kind::is_one ? Kind::is_split : split_; }
    FP16OPT_HD bool bytes() const { return Kind::is_one ? Kind::has_bytes : bytes_; }
    FP16OPT_HD bool half() const { return Kind::is_one ? Kind::is_half : half_; }

    FP16OPT_HD float* singles() const { return reinterpret_cast<float*>(in_global_memory(first_)); }
    FP16OPT_HD Half* remainders() const { return reinterpret_cast<Half*>(in_global_memory(first_)); }
    FP16OPT_HD uint8_t* byte_remainders() const { return reinterpret_cast<uint8_t*>(in_global_memory(first_)); }
    FP16OPT_HD Half* models() const { return in_global_memory(models_); }  // not null here

    template <class Model>
    FP16OPT_HD void join_all(const Words& raw, Eight<float>& p) const {
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) {
            const uint16_t weight = short_of(raw, 0, k);
            p.v[k] = bytes() ? join24(Model{}, weight, uint8_t(raw.word[4 + k / 4] >> (k % 4 * 8)))
                            : join(Model{}, widen(Model{weight}), weight, short_of(raw, 4, k));
        }
    }

    // Weights and remainders of masters; both are clear before.
    template <class Model, bool kNearest>
    FP16OPT_HD void make(int i, const Eight<float>& p, Eight<Half>& weights, Eight<Half>& rest, Found& found) const {
        if (bytes()) {
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
        } else if (split()) {
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
typedef MastersOf<AnyKind> Masters;

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
