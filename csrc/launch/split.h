// The CPU loops over split masters: 64 elements at a time.
#pragma once

#include "steps.h"

#include "../functors/split.h"

FP16OPT_BEGIN

// 64 values of 16 bits.
struct Shorts {
    alignas(64) uint16_t v[kBlock];

    FP16OPT_HD Shorts() {}
    FP16OPT_HD explicit Shorts(const void* from) { memcpy(v, from, sizeof(v)); }
    FP16OPT_HD void copy_to(void* to) const { memcpy(to, v, sizeof(v)); }
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
FP16OPT_HD void widen_weights(Half, const void* weights, Block& wide) {
    load(static_cast<const Half*>(weights), wide);
}
FP16OPT_HD void widen_weights(BFloat16, const void* weights, Block& wide) {
    load(static_cast<const BFloat16*>(weights), wide);
}

// A block goes the short way, in 32 bits at a time, where weights and masters are finite, and else the long one.
#if defined(FP16OPT_AVX512) || defined(FP16OPT_AVX2)

constexpr int kHalfBias = 112;                          // float32's exponent of a half's, less that
constexpr int kLeastExponent = (kHalfBias + 1) << 23;   // of the smallest normal half; subnormals have its step

// Whether one of 64 weights is infinite or nan.
FP16OPT_HD bool is_special(const Half* weights) {
    Narrow n;
    load(static_cast<const void*>(weights), n);
    return any_from(n, 0x7c00u);
}
// Of bfloat16 a master is weight and remainder as one integer, infinite or not.
FP16OPT_HD bool is_special(const BFloat16*) { return false; }

#if defined(FP16OPT_AVX512)

// master_of: as a rule no sign is another, and one look at all of them takes a third of what choosing does.
FP16OPT_HD void make_masters(Block& sums, const Block& weights) {
    __m512i differ = _mm512_setzero_si512();
    for (int i = 0; i < 4; ++i) {  // differ | (sum ^ weight)
        differ = _mm512_ternarylogic_epi32(differ, _mm512_castps_si512(sums.v[i]), _mm512_castps_si512(weights.v[i]), 0xf6);
    }
    if (FP16OPT_UNLIKELY(_mm512_movepi32_mask(differ) != 0)) {
        for (int i = 0; i < 4; ++i) sums.v[i] = master_of(sums.v[i], weights.v[i]);
    }
}

FP16OPT_HD __m512i exponents_of(Floats wide) { return _mm512_and_si512(_mm512_castps_si512(wide), splat_bits(kInfinity)); }
FP16OPT_HD __m512i step_exponents_of(__m512i exponents) { return _mm512_max_epi32(exponents, splat_bits(kLeastExponent)); }
FP16OPT_HD void join_finite(const Half* weights, const uint16_t* remainders, Block& p) {
    Block wide;
    load(weights, wide);
    for (int i = 0; i < 4; ++i) {
        const __m512i exponents = step_exponents_of(exponents_of(wide.v[i]));
        const Floats step = _mm512_castsi512_ps(_mm512_sub_epi32(exponents, splat_bits(26u << 23)));
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(remainders + 16 * i));
        p.v[i] = steps_added(wide.v[i], Floats(_mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(codes))), step);
    }
    make_masters(p, wide);
}
// Rounds to weights and remainders. False where a weight isn't finite.
FP16OPT_HD bool split_finite(const Block& p, Half* weights, uint16_t* remainders) {
    __m512i largest = _mm512_setzero_si512();
    for (int i = 0; i < 4; ++i) {
        const Floats wide = store_rounded(weights + 16 * i, p.v[i]);
        const __m512i exponents = exponents_of(wide);
        largest = _mm512_max_epi32(largest, exponents);
        const __m512i per_one = _mm512_sub_epi32(splat_bits(280u << 23), step_exponents_of(exponents));
        const Floats away = steps_away(p.v[i], wide, Floats(_mm512_castsi512_ps(per_one)));
        const __m256i codes = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(away));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(remainders + 16 * i),
                            _mm256_max_epi16(codes, _mm256_set1_epi16(-32767)));
    }
    return _mm512_cmpge_epi32_mask(largest, splat_bits(kInfinity)) == 0;
}

FP16OPT_HD void join_finite(const BFloat16* weights, const uint16_t* remainders, Block& p) {
    Block wide;
    load(weights, wide);
    for (int i = 0; i < 4; ++i) {
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(remainders + 16 * i));
        p.v[i] = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(wide.v[i]), _mm512_cvtepi16_epi32(codes)));
    }
    make_masters(p, wide);
}
FP16OPT_HD bool split_finite(const Block& p, BFloat16* weights, uint16_t* remainders) {
    if (any_from(p, first_infinite<BFloat16>())) return false;
    Narrow narrow;
    narrow_away(p, narrow);
    store(static_cast<void*>(weights), narrow, false);
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(remainders + 16 * i), _mm512_cvtepi32_epi16(_mm512_castps_si512(p.v[i])));
    }
    return true;
}

#else

FP16OPT_HD __m256i exponents_of(Floats wide) { return _mm256_and_si256(_mm256_castps_si256(wide), _mm256_set1_epi32(kInfinity)); }
FP16OPT_HD __m256i step_exponents_of(__m256i exponents) { return _mm256_max_epi32(exponents, _mm256_set1_epi32(kLeastExponent)); }
FP16OPT_HD void join_finite(const Half* weights, const uint16_t* remainders, Block& p) {
    load(weights, p);
    for (int i = 0; i < 8; ++i) {
        const __m256i exponents = step_exponents_of(exponents_of(p.v[i]));
        const Floats step = _mm256_castsi256_ps(_mm256_sub_epi32(exponents, _mm256_set1_epi32((26 + 16) << 23)));
        p.v[i] = master_of(steps_added(p.v[i], Floats(_mm256_cvtepi32_ps(spread_shorts(remainders + 8 * i))), step), p.v[i]);
    }
}
// Rounds to weights and remainders. False where a weight isn't finite.
FP16OPT_HD bool split_finite(const Block& p, Half* weights, uint16_t* remainders) {
    __m256i largest = _mm256_setzero_si256(), steps[8];
    for (int i = 0; i < 8; ++i) {
        const Floats wide = store_rounded(weights + 8 * i, p.v[i]);
        const __m256i exponents = exponents_of(wide);
        largest = _mm256_max_epi32(largest, exponents);
        const __m256i per_one = _mm256_sub_epi32(_mm256_set1_epi32(280 << 23), step_exponents_of(exponents));
        steps[i] = _mm256_cvtps_epi32(steps_away(p.v[i], wide, Floats(_mm256_castsi256_ps(per_one))));
    }
    for (int i = 0; i < 8; i += 2) {
        const __m256i codes = _mm256_permute4x64_epi64(_mm256_packs_epi32(steps[i], steps[i + 1]), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(remainders + 8 * i),
                            _mm256_max_epi16(codes, _mm256_set1_epi16(-32767)));
    }
    return _mm256_movemask_epi8(_mm256_cmpeq_epi32(largest, _mm256_set1_epi32(kInfinity))) == 0;
}

FP16OPT_HD void join_finite(const BFloat16* weights, const uint16_t* remainders, Block& p) {
    load(weights, p);
    for (int i = 0; i < 8; ++i) {
        const __m256i codes = _mm256_srai_epi32(spread_shorts(remainders + 8 * i), 16);
        p.v[i] = master_of(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p.v[i]), codes)), p.v[i]);
    }
}
FP16OPT_HD bool split_finite(const Block& p, BFloat16* weights, uint16_t* remainders) {
    if (any_from(p, first_infinite<BFloat16>())) return false;
    Narrow narrow;
    narrow_away(p, narrow);
    store(static_cast<void*>(weights), narrow, false);
    const __m256i lower = _mm256_set1_epi32(0xffff);
    for (int i = 0; i < 8; i += 2) {
        const __m256i low = _mm256_and_si256(_mm256_castps_si256(p.v[i]), lower);
        const __m256i high = _mm256_and_si256(_mm256_castps_si256(p.v[i + 1]), lower);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(remainders + 8 * i),
                            _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
    }
    return true;
}

#endif

#else

template <class Model>
FP16OPT_HD bool is_special(const Model*) {
    return true;
}
template <class Model>
FP16OPT_HD void join_finite(const Model*, const uint16_t*, Block&) {}
template <class Model>
FP16OPT_HD bool split_finite(const Block&, Model*, uint16_t*) {
    return false;
}

#endif

// Masters that are kept as the model's own weights and remainders: see FullMaster.
template <class Weight>
class SplitMaster {
public:
    typedef Weight Model;

    FP16OPT_HD SplitMaster(void* model, void* remainder, int64_t model_ahead = kAhead, int64_t ahead = kAhead)
        : model_(static_cast<Model*>(model)), remainder_(static_cast<uint16_t*>(remainder)), model_ahead_(model_ahead),
          ahead_(ahead) {}

    FP16OPT_HD void read(int64_t i, Block& p) const {
        prefetch_block(model_ + i, model_ahead_);
        prefetch_block(remainder_ + i, ahead_);
        if (FP16OPT_UNLIKELY(is_special(static_cast<const Model*>(model_ + i)))) return read_special(model_ + i, remainder_ + i, p);
        join_finite(static_cast<const Model*>(model_ + i), remainder_ + i, p);
    }

    FP16OPT_HD void write(int64_t i, const Block& p) {
        if (FP16OPT_UNLIKELY(!split_finite(p, model_ + i, remainder_ + i))) flags_ |= write_special(p, model_ + i, remainder_ + i);
    }

    FP16OPT_HD void finish() const {}
    FP16OPT_HD uint32_t flags() const { return flags_; }

private:
    // Out of the loops, and without `this`: what a loop reads of a master stays in registers.
    FP16OPT_NOINLINE static void read_special(const Model* model, const uint16_t* remainder, Block& p) {
        Block wide;
        widen_weights(Model{}, model, wide);
        const Shorts weights(model), remainders(remainder);
        Singles joined(wide);
        for (int k = 0; k < kBlock; ++k) joined.v[k] = join(Model{}, joined.v[k], weights.v[k], remainders.v[k]);
        load(static_cast<const float*>(joined.v), p);
    }
    // Gives back the flags of what it wrote.
    FP16OPT_NOINLINE static uint32_t write_special(const Block& p, Model* model, uint16_t* remainder) {
        Block wide;
        const Singles master(p);
        uint32_t flags = 0;
        if (any_from(p, first_infinite<Model>())) {
            for (int k = 0; k < kBlock; ++k) flags |= cast_flags(master.v[k], first_infinite<Model>());
        }
        Shorts weights, remainders;
        weights_of(Model{}, p, master, weights);
        widen_weights(Model{}, weights.v, wide);
        const Singles rounded(wide);
        for (int k = 0; k < kBlock; ++k) {
            remainders.v[k] = split_remainder(Model{}, master.v[k], rounded.v[k], weights.v[k]);
        }
        weights.copy_to(model);
        remainders.copy_to(remainder);
        return flags;
    }

    Model* model_;
    uint16_t* remainder_;
    int64_t model_ahead_, ahead_;
    uint32_t flags_ = 0;
};

// `n` is a multiple of kBlock.
template <class Model>
FP16OPT_HD void join_loop(const SplitMaster<Model>& from, float* out, int64_t n) {
    for (int64_t i = 0; i < n; i += kBlock) {
        Block p;
        from.read(i, p);
        store(out + i, p);
    }
}

template <class Model>
FP16OPT_HD void split_loop(const float* master, SplitMaster<Model>& to, int64_t n) {
    for (int64_t i = 0; i < n; i += kBlock) {
        Block p;
        get(master + i, p);
        to.write(i, p);
    }
}

FP16OPT_END
