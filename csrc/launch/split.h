// The CPU loops over split masters: 64 elements at a time.
#pragma once

#include "../functors/split.h"
#include "steps.h"

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

// Whether a block must go the long way: it goes the short one, in 32 bits at a time, where weights and masters are finite.
template <class Model>
FP16OPT_HD bool is_special(const Block&, uint32_t) {
    return true;
}

#if defined(FP16OPT_AVX512) || defined(FP16OPT_AVX2)

template <>
FP16OPT_HD bool is_special<Half>(const Block& b, uint32_t limit) {
    return any_from(b, limit);
}
template <>
FP16OPT_HD bool is_special<BFloat16>(const Block& b, uint32_t limit) {
    return any_from(b, limit);
}

constexpr int kHalfBias = 112;                          // float32's exponent of a half's, less that
constexpr int kLeastExponent = (kHalfBias + 1) << 23;   // of the smallest normal half; subnormals have its step

#if defined(FP16OPT_AVX512)

FP16OPT_HD __m512i exponents_of(Floats wide) {
    const __m512i found = _mm512_and_si512(_mm512_castps_si512(wide), _mm512_set1_epi32(0x7f800000));
    return _mm512_max_epi32(found, _mm512_set1_epi32(kLeastExponent));
}
FP16OPT_HD void join_finite(Half, const Block& wide, const uint16_t* remainders, Block& p) {
    for (int i = 0; i < 4; ++i) {
        const __m512i exponent = exponents_of(wide.v[i]);
        const Floats step = _mm512_castsi512_ps(_mm512_sub_epi32(exponent, _mm512_set1_epi32(26 << 23)));
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(remainders + 16 * i));
        const Floats near = steps_added(wide.v[i], _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(codes)), step);
        p.v[i] = _mm512_or_ps(near, _mm512_and_ps(wide.v[i], _mm512_set1_ps(-0.0f)));
    }
}
FP16OPT_HD void remainders_of_finite(Half, const Block& master, const Block& wide, uint16_t* remainders) {
    for (int i = 0; i < 4; ++i) {
        const __m512i per_one = _mm512_sub_epi32(_mm512_set1_epi32(280 << 23), exponents_of(wide.v[i]));
        const Floats away = steps_away(master.v[i], wide.v[i], Floats(_mm512_castsi512_ps(per_one)));
        const __m256i codes = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(away));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(remainders + 16 * i),
                            _mm256_max_epi16(codes, _mm256_set1_epi16(-32767)));
    }
}

#else

FP16OPT_HD __m256i exponents_of(Floats wide) {
    const __m256i found = _mm256_and_si256(_mm256_castps_si256(wide), _mm256_set1_epi32(0x7f800000));
    return _mm256_max_epi32(found, _mm256_set1_epi32(kLeastExponent));
}
FP16OPT_HD void join_finite(Half, const Block& wide, const uint16_t* remainders, Block& p) {
    for (int i = 0; i < 8; ++i) {
        const __m256i exponent = exponents_of(wide.v[i]);
        const Floats step = _mm256_castsi256_ps(_mm256_sub_epi32(exponent, _mm256_set1_epi32(26 << 23)));
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(remainders + 8 * i));
        const Floats near = steps_added(wide.v[i], _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(codes)), step);
        p.v[i] = _mm256_or_ps(near, _mm256_and_ps(wide.v[i], _mm256_set1_ps(-0.0f)));
    }
}
FP16OPT_HD __m256i steps_of(Floats master, Floats wide) {
    const __m256i per_one = _mm256_sub_epi32(_mm256_set1_epi32(280 << 23), exponents_of(wide));
    return _mm256_cvtps_epi32(steps_away(master, wide, Floats(_mm256_castsi256_ps(per_one))));
}
FP16OPT_HD void remainders_of_finite(Half, const Block& master, const Block& wide, uint16_t* remainders) {
    for (int i = 0; i < 8; i += 2) {
        const __m256i low = steps_of(master.v[i], wide.v[i]), high = steps_of(master.v[i + 1], wide.v[i + 1]);
        const __m256i codes = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(remainders + 8 * i),
                            _mm256_max_epi16(codes, _mm256_set1_epi16(-32767)));
    }
}

#endif
// Of bfloat16 a master is weight and remainder as one integer.
#if defined(FP16OPT_AVX512)

FP16OPT_HD void join_finite(BFloat16, const Block& wide, const uint16_t* remainders, Block& p) {
    for (int i = 0; i < 4; ++i) {
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(remainders + 16 * i));
        p.v[i] = _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(wide.v[i]), _mm512_cvtepi16_epi32(codes)));
    }
}
FP16OPT_HD void remainders_of_finite(BFloat16, const Block& master, const Block&, uint16_t* remainders) {
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(remainders + 16 * i),
                            _mm512_cvtepi32_epi16(_mm512_castps_si512(master.v[i])));
    }
}

#else

FP16OPT_HD void join_finite(BFloat16, const Block& wide, const uint16_t* remainders, Block& p) {
    for (int i = 0; i < 8; ++i) {
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(remainders + 8 * i));
        p.v[i] = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(wide.v[i]), _mm256_cvtepi16_epi32(codes)));
    }
}
FP16OPT_HD void remainders_of_finite(BFloat16, const Block& master, const Block&, uint16_t* remainders) {
    const __m256i lower = _mm256_set1_epi32(0xffff);
    for (int i = 0; i < 8; i += 2) {
        const __m256i low = _mm256_and_si256(_mm256_castps_si256(master.v[i]), lower);
        const __m256i high = _mm256_and_si256(_mm256_castps_si256(master.v[i + 1]), lower);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(remainders + 8 * i),
                            _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xd8));
    }
}

#endif

#else

template <class Model>
FP16OPT_HD void join_finite(Model, const Block&, const uint16_t*, Block&) {}
template <class Model>
FP16OPT_HD void remainders_of_finite(Model, const Block&, const Block&, uint16_t*) {}

#endif

FP16OPT_HD void narrow_weights(Half, const Block& p, Narrow& narrow) { narrow_to(Half{}, p, narrow); }
FP16OPT_HD void narrow_weights(BFloat16, const Block& p, Narrow& narrow) { narrow_away(p, narrow); }

// Masters that are kept as the model's own weights and remainders: see FullMaster.
template <class Weight>
class SplitMaster {
public:
    typedef Weight Model;

    FP16OPT_HD SplitMaster(void* model, void* remainder)
        : model_(static_cast<Model*>(model)), remainder_(static_cast<uint16_t*>(remainder)) {}

    FP16OPT_HD void read(int64_t i, Block& p) const {
        prefetch_block(model_ + i);
        prefetch_block(remainder_ + i);
        Block wide;
        widen_weights(Model{}, model_ + i, wide);
        if (!is_special<Model>(wide, kInfinity)) return join_finite(Model{}, wide, remainder_ + i, p);
        const Shorts weights(model_ + i), remainders(remainder_ + i);
        Singles joined(wide);
        for (int k = 0; k < kBlock; ++k) joined.v[k] = join(Model{}, joined.v[k], weights.v[k], remainders.v[k]);
        load(static_cast<const float*>(joined.v), p);
    }

    FP16OPT_HD void write(int64_t i, const Block& p) {
        Block wide;
        if (!is_special<Model>(p, first_infinite<Model>())) {
            Narrow narrow;
            narrow_weights(Model{}, p, narrow);
            store(static_cast<void*>(model_ + i), narrow, false);
            widen_weights(Model{}, model_ + i, wide);
            return remainders_of_finite(Model{}, p, wide, remainder_ + i);
        }
        const Singles master(p);
        if (FP16OPT_UNLIKELY(any_from(p, first_infinite<Model>()))) note(master);
        Shorts weights, remainders;
        weights_of(Model{}, p, master, weights);
        widen_weights(Model{}, weights.v, wide);
        const Singles rounded(wide);
        for (int k = 0; k < kBlock; ++k) {
            remainders.v[k] = split_remainder(Model{}, master.v[k], rounded.v[k], weights.v[k]);
        }
        weights.copy_to(model_ + i);
        remainders.copy_to(remainder_ + i);
    }

    FP16OPT_HD void finish() const {}
    FP16OPT_HD uint32_t flags() const { return flags_; }

private:
    FP16OPT_NOINLINE void note(const Singles& master) {
        for (int k = 0; k < kBlock; ++k) flags_ |= cast_flags(master.v[k], first_infinite<Model>());
    }

    Model* model_;
    uint16_t* remainder_;
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
