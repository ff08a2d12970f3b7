// The CPU loops of the one-pass steps: a functor applied to one chunk, 64 elements at a time. As in launch/cpu.h the last,
// incomplete block goes through the same code as the others, in padded copies.
#pragma once

#include "cpu.h"

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wignored-attributes"  // vectors as template arguments lose none that matter here
#endif

#include "../functors/elementary.h"

FP16OPT_BEGIN

// For vectors what functors/elementary.h has for one float. A quotient is the product with the inverse, put right by its
// exact remainder (Markstein: correctly rounded where nothing over- or underflows, and a root of a float32 stays within
// 2^-75 .. 2^64); infinity alone has no remainder. The functors below must see these: no lookup by argument finds
// a function of a vector later.
#if defined(FP16OPT_AVX512)
FP16OPT_HD Floats root(Floats x) { return _mm512_sqrt_ps(x); }
FP16OPT_HD Floats maximum(Floats a, Floats b) {
    const __mmask16 keeps = _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) | _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_mask_mov_ps(b, keeps, a);
}
FP16OPT_HD Floats sign(Floats x) {
    const __m512 zero = _mm512_setzero_ps();
    const __m512 up = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, zero, _CMP_GT_OQ), _mm512_set1_ps(1.0f));
    return _mm512_mask_mov_ps(up, _mm512_cmp_ps_mask(x, zero, _CMP_LT_OQ), _mm512_set1_ps(-1.0f));
}
FP16OPT_HD Floats quotient(Floats x, Floats by, Floats inverse) {
    const Floats near = x * inverse;
    const __mmask16 finite = _mm512_cmp_ps_mask(x, _mm512_set1_ps(bit_cast<float>(kInfinity)), _CMP_NEQ_UQ);
    return _mm512_mask3_fmadd_ps(_mm512_fnmadd_ps(near, by, x), inverse, near, finite);
}
#elif defined(FP16OPT_AVX2)
FP16OPT_HD Floats root(Floats x) { return _mm256_sqrt_ps(x); }
FP16OPT_HD Floats maximum(Floats a, Floats b) {
    const __m256 keeps = _mm256_or_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ), _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_ps(b, a, keeps);
}
FP16OPT_HD Floats sign(Floats x) {
    const __m256 zero = _mm256_setzero_ps();
    const __m256 up = _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_GT_OQ), _mm256_set1_ps(1.0f));
    const __m256 down = _mm256_and_ps(_mm256_cmp_ps(x, zero, _CMP_LT_OQ), _mm256_set1_ps(-1.0f));
    return _mm256_or_ps(up, down);
}
FP16OPT_HD Floats quotient(Floats x, Floats by, Floats inverse) {
    const Floats near = x * inverse;
    const __m256 infinite = _mm256_cmp_ps(x, _mm256_set1_ps(bit_cast<float>(kInfinity)), _CMP_EQ_OQ);
    return _mm256_blendv_ps(_mm256_fmadd_ps(_mm256_fnmadd_ps(near, by, x), inverse, near), near, infinite);
}
#endif

FP16OPT_END

#include "../functors/adam.h"
#include "../functors/lion.h"
#include "../functors/sgd.h"

FP16OPT_BEGIN

struct SplatFloats {
    FP16OPT_HD Floats operator()(float x) const { return splat(x); }
};

// How far ahead of the arithmetic memory is asked for, in bytes of each array. The processor's own prefetcher stops at
// every page, and a step walks through five arrays at once.
constexpr int64_t kAhead = 1024;

template <class T>
FP16OPT_HD void prefetch_block(const T* at) {
#if defined(__GNUC__)
    const char* from = reinterpret_cast<const char*>(at) + kAhead;
    for (size_t line = 0; line < kBlock * sizeof(T); line += 64) __builtin_prefetch(from + line, 0, 3);
#else
    (void)at;
#endif
}

// The first `valid` elements of a block; the others are zero. `valid` is kBlock but for a tail.
template <class T>
FP16OPT_HD void get(const T* from, int valid, Block& b) {
    if (valid == kBlock) {
        prefetch_block(from);
        return load(from, b);
    }
    T padded[kBlock] = {};
    memcpy(padded, from, size_t(valid) * sizeof(T));
    load(static_cast<const T*>(padded), b);
}
FP16OPT_HD void set(float* to, int valid, const Block& b) {
    if (valid == kBlock) return store(to, b);
    float padded[kBlock];
    store(padded, b);
    memcpy(to, padded, size_t(valid) * sizeof(float));
}

// Where masters live. A step reads and writes them through such a type and knows nothing else of how they are stored:
// `read` and `write` take the place in the chunk and how many elements of the block are valid; `finish` comes after the last
// block, then `flags` tells of all that was written. This one is FP32 masters beside the 16-bit weights that they
// are rounded to.
template <class Model>
class FullMaster {
public:
    FP16OPT_HD FullMaster(void* master, void* model, bool stream)
        : master_(static_cast<float*>(master)), model_(static_cast<Model*>(model)), stream_(stream) {}

    FP16OPT_HD void read(int64_t i, int valid, Block& p) { get(static_cast<const float*>(master_ + i), valid, p); }

    FP16OPT_HD void write(int64_t i, int valid, const Block& p) {
        set(master_ + i, valid, p);
        if (FP16OPT_UNLIKELY(any_from(p, first_infinite<Model>()))) note(i, valid);
        Narrow narrow;
        narrow_to(Model{}, p, narrow);
        if (valid == kBlock) {
            store(static_cast<void*>(model_ + i), narrow, stream_);
        } else {
            Model padded[kBlock];
            store(static_cast<void*>(padded), narrow, false);
            memcpy(model_ + i, padded, size_t(valid) * sizeof(Model));
        }
    }

    FP16OPT_HD void finish() const {
        if (stream_) finish_streaming();
    }
    FP16OPT_HD uint32_t flags() const { return flags_; }

private:
    FP16OPT_NOINLINE void note(int64_t i, int valid) {
        for (int k = 0; k < valid; ++k) flags_ |= cast_flags(master_[i + k], first_infinite<Model>());
    }

    float* master_;
    Model* model_;
    bool stream_;
    uint32_t flags_ = 0;
};

// FP32 parameters that are their own masters.
class OwnMaster {
public:
    explicit FP16OPT_HD OwnMaster(void* master) : master_(static_cast<float*>(master)) {}
    FP16OPT_HD void read(int64_t i, int valid, Block& p) { get(static_cast<const float*>(master_ + i), valid, p); }
    FP16OPT_HD void write(int64_t i, int valid, const Block& p) { set(master_ + i, valid, p); }
    FP16OPT_HD void finish() const {}
    FP16OPT_HD uint32_t flags() const { return 0; }

private:
    float* master_;
};

// Calls block(i, valid) for all of n elements.
template <class Each>
FP16OPT_HD void for_blocks(int64_t n, Each&& block) {
    int64_t i = 0;
    for (; i + kBlock <= n; i += kBlock) block(i, kBlock);
    if (i < n) block(i, int(n - i));
}

// `largest` may be null.
template <class Grad, class Master, bool kAmsgrad>
FP16OPT_HD void adam_loop(const AdamTerms<Floats>& terms, const Grad* grad, Master& master, float* exp_avg,
                          float* exp_avg_sq, float* largest, int64_t n) {
    for_blocks(n, [&](int64_t i, int valid) {
        Block g, p, m, v, top;
        get(grad + i, valid, g);
        master.read(i, valid, p);
        get(static_cast<const float*>(exp_avg + i), valid, m);
        get(static_cast<const float*>(exp_avg_sq + i), valid, v);
        if (kAmsgrad) get(static_cast<const float*>(largest + i), valid, top);
        Block roots;
        for (int k = 0; k < kVectors; ++k) {
            adam_moments(terms, g.v[k], p.v[k], m.v[k], v.v[k]);
            roots.v[k] = root(adam_second(v.v[k], kAmsgrad ? &top.v[k] : nullptr));
        }
        for (int k = 0; k < kVectors; ++k) adam_move(terms, p.v[k], m.v[k], roots.v[k]);
        master.write(i, valid, p);
        set(exp_avg + i, valid, m);
        set(exp_avg_sq + i, valid, v);
        if (kAmsgrad) set(largest + i, valid, top);
    });
    master.finish();
}

enum class Momentum { none, first, later };

template <class Grad, class Master, Momentum kMomentum>
FP16OPT_HD void sgd_loop(const SgdTerms<Floats>& terms, const Grad* grad, Master& master, float* buffer, int64_t n) {
    for_blocks(n, [&](int64_t i, int valid) {
        Block g, p, b;
        get(grad + i, valid, g);
        master.read(i, valid, p);
        if constexpr (kMomentum == Momentum::later) get(static_cast<const float*>(buffer + i), valid, b);
        for (int k = 0; k < kVectors; ++k) {
            if constexpr (kMomentum == Momentum::first) b.v[k] = g.v[k];  // any value: it is not looked at
            sgd<kMomentum == Momentum::first>(terms, g.v[k], p.v[k], kMomentum == Momentum::none ? nullptr : &b.v[k]);
        }
        master.write(i, valid, p);
        if constexpr (kMomentum != Momentum::none) set(buffer + i, valid, b);
    });
    master.finish();
}

template <class Grad, class Master>
FP16OPT_HD void lion_loop(const LionTerms<Floats>& terms, const Grad* grad, Master& master, float* exp_avg, int64_t n) {
    for_blocks(n, [&](int64_t i, int valid) {
        Block g, p, m;
        get(grad + i, valid, g);
        master.read(i, valid, p);
        get(static_cast<const float*>(exp_avg + i), valid, m);
        for (int k = 0; k < kVectors; ++k) lion(terms, g.v[k], p.v[k], m.v[k]);
        master.write(i, valid, p);
        set(exp_avg + i, valid, m);
    });
    master.finish();
}

FP16OPT_END
