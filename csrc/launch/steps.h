// The CPU loops of the one-pass steps: a functor applied to whole blocks of 64 elements. An incomplete one comes as a Tail.
#pragma once

#include "cpu.h"

#if defined(__GNUC__)
#pragma GCC diagnostic ignored "-Wignored-attributes"  // vectors as template arguments lose none that matter here
#endif

#include "../functors/elementary.h"

FP16OPT_BEGIN

// For vectors what functors/elementary.h has for one float. A quotient is the product with the inverse, put right by its
// exact remainder (Markstein: correctly rounded where nothing over- or underflows, and a root of a float32 stays within
// 2^-75 .. 2^64); infinity alone has none, and is given one that leaves it infinite. The functors below must see these: no lookup by argument finds
// a function of a vector later.
constexpr float kBelowRemainders = -0x1p64f;  // a maximum with a nan takes its second operand

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
    return _mm512_fmadd_ps(_mm512_max_ps(_mm512_fnmadd_ps(near, by, x), splat(kBelowRemainders)), inverse, near);
}
FP16OPT_HD Floats exact_product_plus(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
FP16OPT_HD Floats signed_as(Floats x, Floats like) {
    const __m512i differs = _mm512_xor_si512(_mm512_castps_si512(x), _mm512_castps_si512(like));
    return _mm512_mask_mov_ps(x, _mm512_movepi32_mask(differs), like);
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
    return _mm256_fmadd_ps(_mm256_max_ps(_mm256_fnmadd_ps(near, by, x), splat(kBelowRemainders)), inverse, near);
}
FP16OPT_HD Floats exact_product_plus(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
FP16OPT_HD Floats signed_as(Floats x, Floats like) { return _mm256_blendv_ps(x, like, _mm256_xor_ps(x, like)); }
#endif

#if defined(FP16OPT_AVX512) || defined(FP16OPT_AVX2)
FP16OPT_HD Floats exact_product_plus(Floats a, float b, Floats c) { return exact_product_plus(a, splat(b), c); }
#endif

FP16OPT_END

#include "formulas.h"

FP16OPT_BEGIN

struct SplatFloats {
    FP16OPT_HD Floats operator()(float x) const { return splat(x); }
};

// How far ahead of the arithmetic memory is asked for where a loop is not told otherwise, in bytes of each array.
constexpr int64_t kAhead = 1024;

template <class T>
FP16OPT_HD void prefetch_block(const T* at, int64_t ahead = kAhead) {
#if defined(__GNUC__)
    const char* from = reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(at) + uintptr_t(ahead));  // in another array
    for (size_t line = 0; line < kBlock * sizeof(T); line += 64) __builtin_prefetch(from + line, 0, 3);
#else
    (void)at, (void)ahead;
#endif
}

// A block that the loop comes to, while memory that is `ahead` bytes from it is asked for.
template <class T>
FP16OPT_HD void get(const T* from, Block& b, int64_t ahead = kAhead) {
    prefetch_block(from, ahead);
    load(from, b);
}

// Gradients, in FP32 where they were unscaled before, else in the dtype of the weights. One branch for 64 elements costs
// nothing beside them.
template <class Model>
struct Gradient {
    const void* at;
    bool wide;
    int64_t ahead;

    FP16OPT_HD void read(int64_t i, Block& g) const {
        if (sizeof(Model) == sizeof(float) || wide) return get(static_cast<const float*>(at) + i, g, ahead);
        get(static_cast<const Model*>(at) + i, g, ahead);
    }
};

// Where masters live. A step reads and writes them through such a type and knows nothing else of how they are stored:
// `read` and `write` take the block's place in the chunk; `finish` comes after the last block, then `flags` tells of all that
// was written. `Model` is the dtype of the weights. This one is FP32 masters beside the 16-bit weights that they are
// rounded to.
template <class Weight>
class FullMaster {
public:
    typedef Weight Model;

    // `model_ahead`: 0 where the memory of weights is not asked for.
    FP16OPT_HD FullMaster(void* master, void* model, int64_t ahead, int64_t model_ahead, bool stream)
        : master_(static_cast<float*>(master)), model_(static_cast<Model*>(model)), ahead_(ahead), model_ahead_(model_ahead),
          stream_(stream) {}

    FP16OPT_HD void read(int64_t i, Block& p) const {
        get(static_cast<const float*>(master_ + i), p, ahead_);
        if (model_ahead_ != 0) prefetch_block(model_ + i, model_ahead_);
    }

    FP16OPT_HD void write(int64_t i, const Block& p) {
        store(master_ + i, p);
        if (FP16OPT_UNLIKELY(any_from(p, first_infinite<Model>()))) note(i);
        Narrow narrow;
        narrow_to(Model{}, p, narrow);
        store(static_cast<void*>(model_ + i), narrow, stream_);
    }

    FP16OPT_HD void finish() const {
        if (stream_) finish_streaming();
    }
    FP16OPT_HD uint32_t flags() const { return flags_; }

private:
    FP16OPT_NOINLINE void note(int64_t i) {
        for (int k = 0; k < kBlock; ++k) flags_ |= cast_flags(master_[i + k], first_infinite<Model>());
    }

    float* master_;
    Model* model_;
    int64_t ahead_, model_ahead_;
    bool stream_;
    uint32_t flags_ = 0;
};

// FP32 parameters that are their own masters.
class OwnMaster {
public:
    typedef float Model;

    FP16OPT_HD OwnMaster(void* master, int64_t ahead) : master_(static_cast<float*>(master)), ahead_(ahead) {}
    FP16OPT_HD void read(int64_t i, Block& p) const { get(static_cast<const float*>(master_ + i), p, ahead_); }
    FP16OPT_HD void write(int64_t i, const Block& p) { store(master_ + i, p); }
    FP16OPT_HD void finish() const {}
    FP16OPT_HD uint32_t flags() const { return 0; }

private:
    float* master_;
    int64_t ahead_;
};

// Blocks of kStates tensors of state. Without loops: a compiler keeps in registers only what it finds by constant indices.
template <int kStates, bool kFirst>
FP16OPT_HD void get_states(float* const* state, const int64_t* ahead, int64_t i, const Block& g, Block* kept) {
    if constexpr (kStates > 0) {
        get_states<kStates - 1, kFirst>(state, ahead, i, g, kept);
        if constexpr (kFirst) {
            kept[kStates - 1] = g;  // any value: it is not looked at
        } else {
            get(static_cast<const float*>(state[kStates - 1] + i), kept[kStates - 1], ahead[kStates - 1]);
        }
    }
}
template <int kStates>
FP16OPT_HD void store_states(float* const* state, int64_t i, const Block* kept) {
    if constexpr (kStates > 0) {
        store_states<kStates - 1>(state, i, kept);
        store(state[kStates - 1] + i, kept[kStates - 1]);
    }
}

// The block at `i`, with kStates tensors of state.
template <class F, int kStates, bool kFirst>
FP16OPT_HD void step_block(const typename F::template Terms<Floats>& terms, Block& g, Block& p, float* const* state,
                           const int64_t* ahead, int64_t i) {
    Block kept[kStates > 0 ? kStates : 1];
    get_states<kStates, kFirst>(state, ahead, i, g, kept);
    for (int k = 0; k < kVectors; ++k) step_one<F, kStates, 0, kFirst>(terms, g, p, kept, k);
    if constexpr (F::phases > 1) {
        for (int k = 0; k < kVectors; ++k) step_one<F, kStates, 1, kFirst>(terms, g, p, kept, k);
    }
    store_states<kStates>(state, i, kept);
}

// The same for as many as there are: one branch for 64 elements, and gradient and masters are compiled once for all.
template <class F, int kStates = F::least_states>
FP16OPT_HD void step_block_of(int states, bool first, const typename F::template Terms<Floats>& terms, Block& g, Block& p,
                              float* const* state, const int64_t* ahead, int64_t i) {
    if constexpr (kStates < F::most_states) {
        if (states > kStates) return step_block_of<F, kStates + 1>(states, first, terms, g, p, state, ahead, i);
    }
    if constexpr (F::fills_first && kStates > 0) {
        if (first) return step_block<F, kStates, true>(terms, g, p, state, ahead, i);
    }
    step_block<F, kStates, false>(terms, g, p, state, ahead, i);
}

// `n` is a multiple of kBlock.
template <class F, class Grad, class Master>
FP16OPT_HD void step_loop(const typename F::template Terms<Floats>& terms, const Grad& grad, Master& master, int states,
                          bool first, float* const* state, const int64_t* ahead, int64_t n) {
    const int64_t own[3] = {ahead[0], ahead[1], ahead[2]};  // stores of vectors may change what others have the address of
    for (int64_t i = 0; i < n; i += kBlock) {
        Block g, p;
        grad.read(i, g);
        master.read(i, p);
        step_block_of<F>(states, first, terms, g, p, state, own, i);
        master.write(i, p);
    }
    master.finish();
}

FP16OPT_END
