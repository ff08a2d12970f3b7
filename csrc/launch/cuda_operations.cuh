// The operations as programs for cuda.cuh: the functors, applied to eight elements a thread.
#pragma once

#include "../functors/accumulate.h"
#include "../functors/axpby.h"
#include "../functors/flags.h"
#include "../functors/lerp.h"
#include "../functors/scale.h"
#include "../functors/unscale.h"
#include "cuda_marks.cuh"

FP16OPT_BEGIN

constexpr uint32_t kInfiniteBits = 0x7f800000u;

// As many rows as keep 64 bytes of each thread's loads in flight.
template <class T>
constexpr FP16OPT_HD int rows_ahead() {
    return sizeof(T) == 4 ? 2 : 4;
}

FP16OPT_HD uint32_t magnitude(float x) { return bit_cast<uint32_t>(x) & 0x7fffffffu; }

// Whether the magnitude of an element, as bits, is `limit` or more: kInfiniteBits finds infinities and nans.
FP16OPT_HD bool any_from(const Eight<float>& e, uint32_t limit) {
    uint32_t largest = magnitude(e.v[0]);
    FP16OPT_UNROLL
    for (int i = 1; i < kGroup; ++i) largest = largest < magnitude(e.v[i]) ? magnitude(e.v[i]) : largest;
    return largest >= limit;
}
FP16OPT_HD bool any_not_finite(const Eight<float>& e) { return any_from(e, kInfiniteBits); }

template <class T>
FP16OPT_HD void widen_to(const Eight<T>& from, Eight<float>& to) {
    FP16OPT_UNROLL
    for (int i = 0; i < kGroup; ++i) to.v[i] = widen(from.get(i));
}

// outs = grads * inv_scale, or outs += where lists.add; then norm and found_inf over all n rows. Lists: grads, outs.
// Without `write` there need be no outs, and all else is as if they were written; without kWrites there is nothing to add to.
template <bool kWrites>
struct UnscaleOf {
    const float* inv_scale;
    int32_t* nonfinite;
    double* sumsq;
    int64_t n;
    double* norm;
    float* found_inf;
    bool write;
    static constexpr int finds = kSumsq | kFlags;

    static FP16OPT_HD uint32_t flags_of(const Eight<float>& product, const Eight<float>& before, const Eight<float>& after,
                                        bool add) {
        uint32_t flags = 0;
        FP16OPT_UNROLL
        for (int i = 0; i < kGroup; ++i) {
            flags |= add ? grad_flags(product.v[i], before.v[i], after.v[i]) : grad_flags(product.v[i]);
        }
        return flags;
    }

    // Whatever is not finite in the product is not finite in the sum.
    template <class From, bool kAdd>
    FP16OPT_HD void group(const Eight<From>& grad, float* out, bool aligned, int left, float factor, Found& found) const {
        Eight<float> product, result;
        widen_to(grad, product);
        if constexpr (kSumsStored<From> && !kAdd) found.sumsq += group_term<From>(product.v);
        FP16OPT_UNROLL
        for (int i = 0; i < kGroup; ++i) {  // padding stays 0, also where the factor is not finite
            product.v[i] = i < left ? unscale(product.v[i], factor) : 0.0f;
        }
        result = product;
        if constexpr (kAdd) {
            Eight<float> before;
            load(before, static_cast<const float*>(out), aligned, left);
            FP16OPT_UNROLL
            for (int i = 0; i < kGroup; ++i) result.v[i] = accumulate(before.v[i], product.v[i]);
            if (FP16OPT_UNLIKELY(any_not_finite(result))) found.flags |= flags_of(product, before, result, true);
        } else if (FP16OPT_UNLIKELY(any_not_finite(result))) {
            found.flags |= flags_of(product, product, result, false);
        }
        if (kWrites && write) store(result, out, aligned, left);
        if constexpr (!kSumsStored<From> || kAdd) found.sumsq += group_term<float>(result.v);
    }

    template <class From, bool kAdd>
    FP16OPT_HD Found work_as(const Lists& lists, const Chunk& chunk, int thread) const {
        const From* grad = lists.at<const From>(0, chunk);
        float* out = lists.at<float>(kWrites && write ? 1 : 0, chunk);  // never null: a choice hides that it is global memory
        const bool aligned = is_aligned(grad), out_aligned = !(kWrites && write) || is_aligned(out);
        const float factor = *inv_scale;
        Found found{0.0, 0, 0};
        // Rows ahead help where nothing is written: then an H200 reads at 0.82 of the speed of its copies. Where they are,
        // stores of several rows at a time come in between the two halves that a thread has of a block of 32 bytes, and the
        // memory takes each by itself: 0.71 of a copy's speed with four rows, 0.85 with two, 0.88 with one. The rarer kinds of
        // work load less ahead anyway: registers that they need would be missing in all.
        constexpr int ahead = kAdd || sizeof(From) != 2 || kWrites ? 1 : 4;
        for_groups<Eight<From>, ahead>(
            chunk.numel, thread, out_aligned, [&](int i, Eight<From>& raw, int left) { load(raw, grad + i, aligned, left); },
            [&](int i, const Eight<From>& raw, int left) {
                group<From, kAdd>(raw, out + i, out_aligned, left, factor, found);
            });
        if constexpr (kSumsStored<From> && !kAdd) found.sumsq = unscale(found.sumsq, square(double(factor)));
        return found;
    }

    template <class From>
    FP16OPT_HD Found work_of(const Lists& lists, const Chunk& chunk, int thread) const {
        if constexpr (kWrites) {
            if (lists.add[chunk.tensor] != 0) return work_as<From, true>(lists, chunk, thread);
        }
        return work_as<From, false>(lists, chunk, thread);
    }

    FP16OPT_HD Found work(const Lists& lists, const Chunk& chunk, int thread) const {
        switch (lists.dtype(0, chunk)) {
            case DType::half: return work_of<Half>(lists, chunk, thread);
            case DType::bfloat16: return work_of<BFloat16>(lists, chunk, thread);
            default: return work_of<float>(lists, chunk, thread);
        }
    }

    FP16OPT_HD void report(const Entry& entry, const Found& found) const {
        nonfinite[entry.row] = int32_t(found.flags);
        sumsq[entry.row] = found.sumsq;
    }

    FP16OPT_HD void finish(Shared& s) const {
        total_of_rows(sumsq, nonfinite, n, s);
        for_threads([&](int t) {
            if (t != 0) return;
            *norm = square_root(s.total.sumsq);
            *found_inf = s.total.flags != 0 ? 1.0f : 0.0f;
        });
    }
};
using Unscale = UnscaleOf<true>;
using Check = UnscaleOf<false>;

// outs = (grads * inv_scale) * factor, in two roundings. Lists: as for Unscale.
struct UnscaleClipped {
    const float *inv_scale, *factor;

    FP16OPT_HD bool is_needed() const { return true; }

    template <class From>
    FP16OPT_HD void write(const Lists& lists, const Chunk& chunk, int thread) const {
        const From* grad = lists.at<const From>(0, chunk);
        float* out = lists.at<float>(1, chunk);
        const bool aligned = is_aligned(grad), out_aligned = is_aligned(out);
        const float first = *inv_scale, second = *factor;
        const auto clipped = [first, second](const Eight<From>& raw) {
            Eight<float> e;
            widen_to(raw, e);
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) e.v[k] = scale(unscale(e.v[k], first), second);
            return e;
        };
        // Nothing is added up here, so a thread may take its elements where the memory likes them.
        const int whole = aligned && out_aligned ? chunk.numel / kRow * kRow : 0;
        for (int i = thread * kGroup / 2; i < whole; i += kRow) {
            Eight<From> raw;
            load_apart(raw, grad + i, kRow / 2);
            store_apart(clipped(raw), out + i, kRow / 2);
        }
        for_groups<Eight<From>, 1>(
            chunk.numel - whole, thread, out_aligned,
            [&](int i, Eight<From>& raw, int left) { load(raw, grad + whole + i, aligned, left); },
            [&](int i, const Eight<From>& raw, int left) { store(clipped(raw), out + whole + i, out_aligned, left); });
    }

    FP16OPT_HD void work(const Lists& lists, const Chunk& chunk, int thread) const {
        switch (lists.dtype(0, chunk)) {
            case DType::half: return write<Half>(lists, chunk, thread);
            case DType::bfloat16: return write<BFloat16>(lists, chunk, thread);
            default: return write<float>(lists, chunk, thread);
        }
    }
};

// Sums of squares, each norm, and the total over all n rows.
struct Norm {
    double* sumsq;
    int64_t n;
    double *norm, *norms;
    static constexpr int finds = kSumsq;

    template <class From>
    static FP16OPT_HD Found work_as(const Lists& lists, const Chunk& chunk, int thread) {
        const From* values = lists.at<const From>(0, chunk);
        const bool aligned = is_aligned(values);
        Found found{0.0, 0, 0};
        for_groups<Eight<From>, rows_ahead<From>()>(
            chunk.numel, thread, true,
            [&](int i, Eight<From>& raw, int left) { load(raw, values + i, aligned, left); },
            [&](int, const Eight<From>& raw, int) {
                Eight<float> wide;
                widen_to(raw, wide);
                found.sumsq += group_term<From>(wide.v);
            });
        return found;
    }

    FP16OPT_HD Found work(const Lists& lists, const Chunk& chunk, int thread) const {
        switch (lists.dtype(0, chunk)) {
            case DType::half: return work_as<Half>(lists, chunk, thread);
            case DType::bfloat16: return work_as<BFloat16>(lists, chunk, thread);
            default: return work_as<float>(lists, chunk, thread);
        }
    }

    FP16OPT_HD void report(const Entry& entry, const Found& found) const { sumsq[entry.row] = found.sumsq; }

    FP16OPT_HD void finish(Shared& s) const {
        total_of_rows(sumsq, nullptr, n, s);
        for_threads([&](int t) {
            if (t == 0) *norm = square_root(s.total.sumsq);
            FP16OPT_ROLLED
            for (int64_t i = t; i < n; i += kThreads) norms[i] = square_root(read_fresh(sumsq + i));
        });
    }
};

// Rounds masters to 16 bits. Lists: masters, params.
struct Cast : Marking {
    int32_t* overflow;

    template <class To>
    FP16OPT_HD Found work_as(const Lists& lists, const Chunk& chunk, int thread) const {
        const float* master = lists.at<const float>(0, chunk);
        To* param = lists.at<To>(1, chunk);
        const bool aligned = is_aligned(master), param_aligned = is_aligned(param);
        const ChunkMarks marks(*this, lists, chunk);
        Found found{0.0, 0, 0};
        for_groups<Eight<float>, rows_ahead<float>()>(
            chunk.numel, thread, param_aligned,
            [&](int i, Eight<float>& raw, int left) { load(raw, master + i, aligned, left); },
            [&](int i, const Eight<float>& raw, int left) {
                if (FP16OPT_UNLIKELY(any_from(raw, first_infinite<To>()))) {
                    FP16OPT_UNROLL
                    for (int k = 0; k < kGroup; ++k) found.flags |= cast_flags(raw.v[k], first_infinite<To>());
                }
                const Eight<To> rounded = narrow_eight<To>(raw);
                marks.note(i, static_cast<const To*>(param), param_aligned, rounded, left, found);
                store(rounded, param + i, param_aligned, left);
            });
        return found;
    }

    FP16OPT_HD Found work(const Lists& lists, const Chunk& chunk, int thread) const {
        if (lists.dtype(1, chunk) == DType::half) return work_as<Half>(lists, chunk, thread);
        return work_as<BFloat16>(lists, chunk, thread);
    }

    FP16OPT_HD void report(const Entry& entry, const Found& found) const {
        overflow[entry.row] = int32_t(found.flags);
        add_guard(entry, found);
    }

    FP16OPT_HD void finish(Shared&) const {}
};

// The digest of each 16-bit tensor's sample. It sees bits, so one storage type serves for both.
struct Sample {
    int64_t* samples;
    static constexpr int finds = kDigest;

    FP16OPT_HD Found work(const Lists& lists, const Chunk& chunk, int thread) const {
        const Half* values = lists.at<const Half>(0, chunk);
        const int64_t stride = lists.table[chunk.tensor].stride;
        Found found{0.0, 0, 0};
        if (stride == 0) {
            const bool aligned = is_aligned(values);
            for_groups<Eight<Half>, rows_ahead<Half>()>(
                chunk.numel, thread, true, [&](int i, Eight<Half>& raw, int left) { load(raw, values + i, aligned, left); },
                [&](int i, const Eight<Half>& raw, int left) { found.digest += raw.sample_terms(i / 4, left); });
            return found;
        }
        const int64_t first = (chunk.start + stride - 1) / stride;
        FP16OPT_ROLLED
        for (int64_t i = (first + thread) * stride; i < chunk.start + chunk.numel; i += kThreads * stride) {
            found.digest += sample_term(values[i - chunk.start].bits, i);
        }
        return found;
    }
    FP16OPT_HD void report(const Entry& entry, const Found& found) const {
        samples[entry.row] = int64_t(found.digest);
    }
    FP16OPT_HD void finish(Shared&) const {}
};

// values *= factor, in place. At exactly 1 nothing is read.
struct Scale {
    const float* factor;

    FP16OPT_HD bool is_needed() const { return *factor != 1.0f; }

    template <class T>
    FP16OPT_HD void work_as(const Lists& lists, const Chunk& chunk, int thread) const {
        T* values = lists.at<T>(0, chunk);
        const bool aligned = is_aligned(values);
        const float by = *factor;
        for_groups<Eight<T>, rows_ahead<T>()>(
            chunk.numel, thread, aligned, [&](int i, Eight<T>& raw, int left) { load(raw, values + i, aligned, left); },
            [&](int i, const Eight<T>& raw, int left) {
                Eight<float> wide;
                widen_to(raw, wide);
                FP16OPT_UNROLL
                for (int k = 0; k < kGroup; ++k) wide.v[k] = scale(wide.v[k], by);
                store(narrow_eight<T>(wide), values + i, aligned, left);
            });
    }

    FP16OPT_HD void work(const Lists& lists, const Chunk& chunk, int thread) const {
        switch (lists.dtype(0, chunk)) {
            case DType::half: return work_as<Half>(lists, chunk, thread);
            case DType::bfloat16: return work_as<BFloat16>(lists, chunk, thread);
            default: return work_as<float>(lists, chunk, thread);
        }
    }
};

// Memory of a dtype that is known only at run time: one branch for eight elements.
struct Stretch {
    DType dtype;
    char* at;
    bool aligned;

    FP16OPT_HD Stretch(DType of, char* from) : dtype(of), at(from), aligned(is_aligned(from)) {}

    template <class T>
    FP16OPT_HD void get_as(int i, Eight<float>& to, int left) const {
        Eight<T> raw;
        load(raw, reinterpret_cast<const T*>(at) + i, aligned, left);
        widen_to(raw, to);
    }
    FP16OPT_HD void get(int i, Eight<float>& to, int left) const {
        switch (dtype) {
            case DType::half: return get_as<Half>(i, to, left);
            case DType::bfloat16: return get_as<BFloat16>(i, to, left);
            default: return get_as<float>(i, to, left);
        }
    }
    FP16OPT_HD void set(int i, const Eight<float>& from, int left) const {
        switch (dtype) {
            case DType::half: return store(narrow_eight<Half>(from), reinterpret_cast<Half*>(at) + i, aligned, left);
            case DType::bfloat16:
                return store(narrow_eight<BFloat16>(from), reinterpret_cast<BFloat16*>(at) + i, aligned, left);
            default: return store(from, reinterpret_cast<float*>(at) + i, aligned, left);
        }
    }
};

// outs = a * xs + b * ys. Lists: xs, ys, outs. found_inf is set to 1 where a checked input is not finite, never cleared.
struct Axpby {
    float a, b;
    uint32_t check;  // 1: xs, 2: ys, 3: both
    float* found_inf;

    FP16OPT_HD bool is_needed() const { return true; }

    FP16OPT_HD void work(const Lists& lists, const Chunk& chunk, int thread) const {
        const Stretch xs(lists.dtype(0, chunk), lists.bytes_at(0, chunk));
        const Stretch ys(lists.dtype(1, chunk), lists.bytes_at(1, chunk));
        const Stretch outs(lists.dtype(2, chunk), lists.bytes_at(2, chunk));
        bool bad = false;
        for (int i = thread * kGroup; i < chunk.numel; i += kRow) {
            Eight<float> x, y;
            xs.get(i, x, chunk.numel - i);
            ys.get(i, y, chunk.numel - i);
            bad |= ((check & 1u) != 0 && any_not_finite(x)) || ((check & 2u) != 0 && any_not_finite(y));
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) x.v[k] = axpby(a, x.v[k], b, y.v[k]);
            outs.set(i, x, chunk.numel - i);
        }
        if (bad) *found_inf = 1.0f;  // whichever thread comes last writes the same
    }
};

// Running averages take values in, from the nearer end: see functors/lerp.h. Lists: averages, values.
struct Lerp {
    float part;            // of the way
    int32_t from_average;  // 1; or 0: from the value

    FP16OPT_HD bool is_needed() const { return true; }

    template <class T>
    FP16OPT_HD void work_as(const Lists& lists, const Chunk& chunk, int thread) const {
        struct Pair {
            Eight<float> average;
            Eight<T> value;
        };
        float* averages = lists.at<float>(0, chunk);
        const T* values = lists.at<const T>(1, chunk);
        const bool aligned = is_aligned(averages), values_aligned = is_aligned(values);
        for_groups<Pair, 2>(
            chunk.numel, thread, aligned,
            [&](int i, Pair& raw, int left) {
                load(raw.average, static_cast<const float*>(averages) + i, aligned, left);
                load(raw.value, values + i, values_aligned, left);
            },
            [&](int i, const Pair& raw, int left) {
                Eight<float> result, value;
                widen_to(raw.value, value);
                FP16OPT_UNROLL
                for (int k = 0; k < kGroup; ++k) {
                    result.v[k] = from_average != 0 ? lerp(raw.average.v[k], value.v[k], part)
                                                    : lerp(value.v[k], raw.average.v[k], part);
                }
                store(result, averages + i, aligned, left);
            });
    }

    FP16OPT_HD void work(const Lists& lists, const Chunk& chunk, int thread) const {
        switch (lists.dtype(1, chunk)) {
            case DType::half: return work_as<Half>(lists, chunk, thread);
            case DType::bfloat16: return work_as<BFloat16>(lists, chunk, thread);
            default: return work_as<float>(lists, chunk, thread);
        }
    }
};

// Masters take the model's values in the elements whose bits are not those of the rounded master, in tensors whose
// digests differ. Lists: masters, params.
struct Take {
    const int64_t *now, *then;  // digests, by row
    int32_t* taken;             // by row: set to 1 where an element was taken, never cleared

    FP16OPT_HD bool is_needed() const { return true; }

    template <class T>
    static FP16OPT_HD bool group(float* master, const T* param, bool aligned, bool param_aligned, int left) {
        Eight<float> value;
        Eight<T> model;
        load(value, static_cast<const float*>(master), aligned, left);
        load(model, param, param_aligned, left);
        bool differs = false;
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) {
            const bool other = narrow<T>(value.v[k]).bits != model.get(k).bits;
            value.v[k] = other ? widen(model.get(k)) : value.v[k];
            differs |= other;
        }
        if (differs) store_alone(value, master, aligned, left);
        return differs;
    }

    template <class T>
    FP16OPT_HD void work_as(const Lists& lists, const Chunk& chunk, int thread) const {
        float* master = lists.at<float>(0, chunk);
        const T* param = lists.at<const T>(1, chunk);
        const bool aligned = is_aligned(master), param_aligned = is_aligned(param);
        bool differs = false;
        for (int i = thread * kGroup; i < chunk.numel; i += kRow) {
            differs |= group(master + i, param + i, aligned, param_aligned, chunk.numel - i);
        }
        if (differs) taken[lists.table[chunk.tensor].row] = 1;
    }

    FP16OPT_HD void work(const Lists& lists, const Chunk& chunk, int thread) const {
        const int64_t row = lists.table[chunk.tensor].row;
        if (now[row] == then[row]) return;
        if (lists.dtype(1, chunk) == DType::half) return work_as<Half>(lists, chunk, thread);
        work_as<BFloat16>(lists, chunk, thread);
    }
};

FP16OPT_END
