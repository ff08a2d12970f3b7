// The operations as programs for cuda.cuh: the functors, applied to eight elements a thread.
#pragma once

#include "../functors/accumulate.h"
#include "../functors/axpby.h"
#include "../functors/flags.h"
#include "../functors/scale.h"
#include "../functors/unscale.h"
#include "cuda.cuh"

FP16OPT_BEGIN

constexpr uint32_t kInfiniteBits = 0x7f800000u;

// As many rows as keep 64 bytes of each thread's loads in flight.
template <class T>
constexpr FP16OPT_HD int rows_ahead() {
    return sizeof(T) == 8 ? 1 : sizeof(T) == 4 ? 2 : 4;
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
FP16OPT_HD void widen_to(const Eight<double>& from, Eight<double>& to) { to = from; }

// A group's terms in the content hash, and in the sample of it.
FP16OPT_HD void add_hash(const Eight<Half>& e, const Chunk& chunk, int i, int valid, bool in_sample, Found& found) {
    const uint64_t terms = e.hash((chunk.start + i) / 4, valid);
    found.hash += terms;
    if (in_sample) found.sample += terms;
}

// One thread's part of the hash and of the sample of a chunk. They see bits, so one storage type serves for both.
FP16OPT_HD Found hash_chunk(const Half* values, const Chunk& chunk, int thread) {
    const bool aligned = is_aligned(values);
    const int mask = int(sample_stride(chunk.numel)) - 1;  // a power of two, less one
    Found found{0.0, 0, 0, 0};
    for_groups<Eight<Half>, rows_ahead<Half>()>(
        chunk.numel, thread, [&](int i, Eight<Half>& raw, int valid) { load(raw, values + i, aligned, valid); },
        [&](int i, const Eight<Half>& raw, int valid) { add_hash(raw, chunk, i, valid, (i & mask) < 64, found); });
    return found;
}

// outs = grads * inv_scale, or outs += where lists.add; then norm and found_inf over all n rows. Lists: grads, outs, and
// 16-bit tensors that are hashed in passing; an entry may have nothing but such a tensor. Without `write` outs stay as
// they are, and all else is as if they were written.
struct Unscale {
    const float* inv_scale;
    int32_t* nonfinite;
    double* sumsq;
    int64_t n;
    double* norm;
    float* found_inf;
    int64_t *hashes, *samples;  // null where nothing is hashed
    bool write;
    static constexpr int finds = kSumsq | kHash | kSample | kFlags;

    template <class From, bool kWatched>
    struct Raw {
        Eight<From> grad;
        Eight<Half> watched;
    };
    template <class From>
    struct Raw<From, false> {
        Eight<From> grad;
    };

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
    FP16OPT_HD void group(const Eight<From>& grad, float* out, bool aligned, int valid, float factor, Found& found) const {
        Eight<float> product, result;
        widen_to(grad, product);
        if constexpr (kSumsStored<From> && !kAdd) found.sumsq += stored_group_of(product);
        FP16OPT_UNROLL
        for (int i = 0; i < kGroup; ++i) {  // padding stays 0, also where the factor is not finite
            product.v[i] = i < valid ? unscale(product.v[i], factor) : 0.0f;
        }
        result = product;
        if constexpr (kAdd) {
            Eight<float> before;
            load(before, static_cast<const float*>(out), aligned, valid);
            FP16OPT_UNROLL
            for (int i = 0; i < kGroup; ++i) result.v[i] = accumulate(before.v[i], product.v[i]);
            if (FP16OPT_UNLIKELY(any_not_finite(result))) found.flags |= flags_of(product, before, result, true);
        } else if (FP16OPT_UNLIKELY(any_not_finite(result))) {
            found.flags |= flags_of(product, product, result, false);
        }
        if (write) store(result, out, aligned, valid);
        if constexpr (!kSumsStored<From> || kAdd) found.sumsq += group_of(result);
    }

    template <class From, bool kWatched, bool kAdd>
    FP16OPT_HD Found work_as(const Lists& lists, const Chunk& chunk, int thread) const {
        const From* grad = lists.at<const From>(0, chunk);
        float* out = lists.at<float>(1, chunk);
        const Half* watched = kWatched ? lists.at<const Half>(2, chunk) : nullptr;
        const bool aligned = is_aligned(grad), out_aligned = is_aligned(out), watched_aligned = is_aligned(watched);
        const float factor = *inv_scale;
        const int mask = int(sample_stride(chunk.numel)) - 1;  // a power of two, less one
        Found found{0.0, 0, 0, 0};
        // The rarer kinds of work load less ahead: registers that they need would be missing in all.
        constexpr int ahead = kAdd || sizeof(From) != 2 ? 1 : kWatched ? 2 : 4;
        for_groups<Raw<From, kWatched>, ahead>(
            chunk.numel, thread,
            [&](int i, Raw<From, kWatched>& raw, int valid) {
                load(raw.grad, grad + i, aligned, valid);
                if constexpr (kWatched) load(raw.watched, watched + i, watched_aligned, valid);
            },
            [&](int i, const Raw<From, kWatched>& raw, int valid) {
                group<From, kAdd>(raw.grad, out + i, out_aligned, valid, factor, found);
                if constexpr (kWatched) add_hash(raw.watched, chunk, i, valid, (i & mask) < 64, found);
            });
        if constexpr (kSumsStored<From> && !kAdd) found.sumsq = unscale(found.sumsq, square(double(factor)));
        return found;
    }

    template <class From>
    FP16OPT_HD Found work_of(const Lists& lists, const Chunk& chunk, int thread) const {
        const bool watched = hashes != nullptr && lists.table[chunk.tensor].watched;
        if (lists.add[chunk.tensor] == 0) {
            return watched ? work_as<From, true, false>(lists, chunk, thread)
                           : work_as<From, false, false>(lists, chunk, thread);
        }
        return watched ? work_as<From, true, true>(lists, chunk, thread)
                       : work_as<From, false, true>(lists, chunk, thread);
    }

    // Two elements at a time: eight doubles and what becomes of them would take more registers than all else here.
    FP16OPT_HD Found work_wide(const Lists& lists, const Chunk& chunk, int thread) const {
        const double* grad = lists.at<const double>(0, chunk);
        double* out = lists.at<double>(1, chunk);
        const bool aligned = is_aligned(grad), out_aligned = is_aligned(out), add = lists.add[chunk.tensor] != 0;
        const double factor = double(*inv_scale);
        Found found{0.0, 0, 0, 0};
        for (int i = thread * kGroup; i < chunk.numel; i += kRow) {
            double pairs[kGroup / 2];
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup / 2; ++k) {
                const int first = i + 2 * k, left = chunk.numel - first;
                Two value(grad + first, aligned, left), before(out + first, out_aligned, add ? left : 0);
                for (int j = 0; j < 2; ++j) {
                    const double product = j < left ? unscale(value.v[j], factor) : 0.0;
                    value.v[j] = add ? accumulate(before.v[j], product) : product;
                    found.flags |= add ? grad_flags(product, before.v[j], value.v[j]) : grad_flags(product);
                }
                if (write) value.store(out + first, out_aligned, left);
                pairs[k] = square(value.v[0]) + square(value.v[1]);
            }
            found.sumsq += (pairs[0] + pairs[1]) + (pairs[2] + pairs[3]);
        }
        return found;
    }

    FP16OPT_HD Found work(const Lists& lists, const Chunk& chunk, int thread) const {
        if (!lists.table[chunk.tensor].served) {
            if (hashes == nullptr) return Found{0.0, 0, 0, 0};
            return hash_chunk(lists.at<const Half>(2, chunk), chunk, thread);
        }
        switch (lists.dtype(0, chunk)) {
            case DType::half: return work_of<Half>(lists, chunk, thread);
            case DType::bfloat16: return work_of<BFloat16>(lists, chunk, thread);
            case DType::single: return work_of<float>(lists, chunk, thread);
            default: return work_wide(lists, chunk, thread);
        }
    }

    FP16OPT_HD void report(const Entry& entry, const Found& found) const {
        if (entry.served) {
            nonfinite[entry.row] = int32_t(found.flags);
            sumsq[entry.row] = found.sumsq;
        }
        if (hashes != nullptr && entry.watched) {
            hashes[entry.row] = int64_t(found.hash);
            samples[entry.row] = int64_t(found.sample);
        }
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

// outs = (grads * inv_scale) * factor, in two roundings; of these nothing is found. Lists: as for Unscale.
struct UnscaleClipped {
    const float *inv_scale, *factor;
    int64_t *hashes, *samples;  // null where nothing is hashed
    static constexpr int finds = kHash | kSample;

    template <class From, class Out>
    FP16OPT_HD void write(const Lists& lists, const Chunk& chunk, int thread) const {
        const From* grad = lists.at<const From>(0, chunk);
        Out* out = lists.at<Out>(1, chunk);
        const bool aligned = is_aligned(grad), out_aligned = is_aligned(out);
        const Out first = Out(*inv_scale), second = Out(*factor);
        for_groups<Eight<From>, rows_ahead<From>()>(
            chunk.numel, thread, [&](int i, Eight<From>& raw, int valid) { load(raw, grad + i, aligned, valid); },
            [&](int i, const Eight<From>& raw, int valid) {
                Eight<Out> e;
                widen_to(raw, e);
                FP16OPT_UNROLL
                for (int k = 0; k < kGroup; ++k) e.v[k] = scale(unscale(e.v[k], first), second);
                store(e, out + i, out_aligned, valid);
            });
    }

    FP16OPT_HD Found work(const Lists& lists, const Chunk& chunk, int thread) const {
        if (lists.table[chunk.tensor].served) {
            switch (lists.dtype(0, chunk)) {
                case DType::half: write<Half, float>(lists, chunk, thread); break;
                case DType::bfloat16: write<BFloat16, float>(lists, chunk, thread); break;
                case DType::single: write<float, float>(lists, chunk, thread); break;
                default: write<double, double>(lists, chunk, thread);
            }
        }
        if (hashes == nullptr || !lists.table[chunk.tensor].watched) return Found{0.0, 0, 0, 0};
        return hash_chunk(lists.at<const Half>(2, chunk), chunk, thread);
    }

    FP16OPT_HD void report(const Entry& entry, const Found& found) const {
        if (hashes == nullptr || !entry.watched) return;
        hashes[entry.row] = int64_t(found.hash);
        samples[entry.row] = int64_t(found.sample);
    }

    FP16OPT_HD void finish(Shared&) const {}
};

// Sums of squares, each norm, and the total over all n rows.
struct Norm {
    double* sumsq;
    int64_t n;
    double *norm, *norms;
    static constexpr int finds = kSumsq;

    template <class From, class Wide>
    static FP16OPT_HD Found work_as(const Lists& lists, const Chunk& chunk, int thread) {
        const From* values = lists.at<const From>(0, chunk);
        const bool aligned = is_aligned(values);
        Found found{0.0, 0, 0, 0};
        for_groups<Eight<From>, rows_ahead<From>()>(
            chunk.numel, thread,
            [&](int i, Eight<From>& raw, int valid) { load(raw, values + i, aligned, valid); },
            [&](int, const Eight<From>& raw, int) {
                Eight<Wide> wide;
                widen_to(raw, wide);
                if constexpr (kSumsStored<From>) {
                    found.sumsq += stored_group_of(wide);
                } else {
                    found.sumsq += group_of(wide);
                }
            });
        return found;
    }

    FP16OPT_HD Found work(const Lists& lists, const Chunk& chunk, int thread) const {
        switch (lists.dtype(0, chunk)) {
            case DType::half: return work_as<Half, float>(lists, chunk, thread);
            case DType::bfloat16: return work_as<BFloat16, float>(lists, chunk, thread);
            case DType::single: return work_as<float, float>(lists, chunk, thread);
            default: return work_as<double, double>(lists, chunk, thread);
        }
    }

    FP16OPT_HD void report(const Entry& entry, const Found& found) const { sumsq[entry.row] = found.sumsq; }

    FP16OPT_HD void finish(Shared& s) const {
        total_of_rows(sumsq, nullptr, n, s);
        for_threads([&](int t) {
            if (t == 0) *norm = square_root(s.total.sumsq);
            for (int64_t i = t; i < n; i += kThreads) norms[i] = square_root(read_fresh(sumsq + i));
        });
    }
};

// Rounds masters to 16 bits. Lists: masters, params.
struct Cast {
    int32_t* overflow;
    int64_t* hashes;
    static constexpr int finds = kHash | kFlags;

    template <class To>
    static FP16OPT_HD Found work_as(const Lists& lists, const Chunk& chunk, int thread) {
        const float* master = lists.at<const float>(0, chunk);
        To* param = lists.at<To>(1, chunk);
        const bool aligned = is_aligned(master), param_aligned = is_aligned(param);
        Found found{0.0, 0, 0, 0};
        for_groups<Eight<float>, rows_ahead<float>()>(
            chunk.numel, thread,
            [&](int i, Eight<float>& raw, int valid) { load(raw, master + i, aligned, valid); },
            [&](int i, const Eight<float>& raw, int valid) {
                if (FP16OPT_UNLIKELY(any_from(raw, first_infinite<To>()))) {
                    FP16OPT_UNROLL
                    for (int k = 0; k < kGroup; ++k) found.flags |= cast_flags(raw.v[k], first_infinite<To>());
                }
                const Eight<To> rounded = narrow_eight<To>(raw);
                store(rounded, param + i, param_aligned, valid);
                found.hash += rounded.hash((chunk.start + i) / 4, valid);
            });
        return found;
    }

    FP16OPT_HD Found work(const Lists& lists, const Chunk& chunk, int thread) const {
        if (lists.dtype(1, chunk) == DType::half) return work_as<Half>(lists, chunk, thread);
        return work_as<BFloat16>(lists, chunk, thread);
    }

    FP16OPT_HD void report(const Entry& entry, const Found& found) const {
        overflow[entry.row] = int32_t(found.flags);
        hashes[entry.row] = int64_t(found.hash);
    }

    FP16OPT_HD void finish(Shared&) const {}
};

// The content hash of 16-bit tensors. It sees bits, so one storage type serves for both.
struct Hash {
    int64_t* hashes;
    static constexpr int finds = kHash;

    FP16OPT_HD Found work(const Lists& lists, const Chunk& chunk, int thread) const {
        return hash_chunk(lists.at<const Half>(0, chunk), chunk, thread);
    }
    FP16OPT_HD void report(const Entry& entry, const Found& found) const { hashes[entry.row] = int64_t(found.hash); }
    FP16OPT_HD void finish(Shared&) const {}
};

// The hash of a few elements from everywhere: eight threads take the 64 of every 8,192.
struct Sample {
    int64_t* samples;
    static constexpr int finds = kSample;

    FP16OPT_HD Found work(const Lists& lists, const Chunk& chunk, int thread) const {
        const Half* values = lists.at<const Half>(0, chunk);
        const bool aligned = is_aligned(values);
        const int every = int(sample_stride(chunk.numel)), width = kThreads / 8 * every;
        Found found{0.0, 0, 0, 0};
        for (int i = thread / 8 * every + thread % 8 * kGroup; i < chunk.numel; i += width) {
            Eight<Half> raw;
            const int valid = chunk.numel - i < kGroup ? chunk.numel - i : kGroup;
            load(raw, values + i, aligned, valid);
            add_hash(raw, chunk, i, valid, true, found);
        }
        return found;
    }
    FP16OPT_HD void report(const Entry& entry, const Found& found) const {
        samples[entry.row] = int64_t(found.sample);
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
            chunk.numel, thread, [&](int i, Eight<T>& raw, int valid) { load(raw, values + i, aligned, valid); },
            [&](int i, const Eight<T>& raw, int valid) {
                Eight<float> wide;
                widen_to(raw, wide);
                FP16OPT_UNROLL
                for (int k = 0; k < kGroup; ++k) wide.v[k] = scale(wide.v[k], by);
                store(narrow_eight<T>(wide), values + i, aligned, valid);
            });
    }

    FP16OPT_HD void work_wide(const Lists& lists, const Chunk& chunk, int thread) const {
        double* values = lists.at<double>(0, chunk);
        const bool aligned = is_aligned(values);
        const double by = double(*factor);
        for_groups<Eight<double>, rows_ahead<double>()>(
            chunk.numel, thread,
            [&](int i, Eight<double>& raw, int valid) { load(raw, values + i, aligned, valid); },
            [&](int i, const Eight<double>& raw, int valid) {
                Eight<double> scaled;
                FP16OPT_UNROLL
                for (int k = 0; k < kGroup; ++k) scaled.v[k] = scale(raw.v[k], by);
                store(scaled, values + i, aligned, valid);
            });
    }

    FP16OPT_HD void work(const Lists& lists, const Chunk& chunk, int thread) const {
        switch (lists.dtype(0, chunk)) {
            case DType::half: return work_as<Half>(lists, chunk, thread);
            case DType::bfloat16: return work_as<BFloat16>(lists, chunk, thread);
            case DType::single: return work_as<float>(lists, chunk, thread);
            default: return work_wide(lists, chunk, thread);
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
    FP16OPT_HD void get_as(int i, Eight<float>& to, int valid) const {
        Eight<T> raw;
        load(raw, reinterpret_cast<const T*>(at) + i, aligned, valid);
        widen_to(raw, to);
    }
    FP16OPT_HD void get(int i, Eight<float>& to, int valid) const {
        switch (dtype) {
            case DType::half: return get_as<Half>(i, to, valid);
            case DType::bfloat16: return get_as<BFloat16>(i, to, valid);
            default: return get_as<float>(i, to, valid);
        }
    }
    FP16OPT_HD void set(int i, const Eight<float>& from, int valid) const {
        switch (dtype) {
            case DType::half: return store(narrow_eight<Half>(from), reinterpret_cast<Half*>(at) + i, aligned, valid);
            case DType::bfloat16:
                return store(narrow_eight<BFloat16>(from), reinterpret_cast<BFloat16*>(at) + i, aligned, valid);
            default: return store(from, reinterpret_cast<float*>(at) + i, aligned, valid);
        }
    }
};

// outs = a * xs + b * ys. Lists: xs, ys, outs. found_inf is set to 1 where a checked input is not finite, never cleared.
struct Axpby {
    float a, b;
    bool check_x, check_y;
    float* found_inf;

    FP16OPT_HD bool is_needed() const { return true; }

    FP16OPT_HD void work(const Lists& lists, const Chunk& chunk, int thread) const {
        const Stretch xs(lists.dtype(0, chunk), lists.bytes_at(0, chunk));
        const Stretch ys(lists.dtype(1, chunk), lists.bytes_at(1, chunk));
        const Stretch outs(lists.dtype(2, chunk), lists.bytes_at(2, chunk));
        bool bad = false;
        for (int i = thread * kGroup; i < chunk.numel; i += kRow) {
            const int valid = chunk.numel - i < kGroup ? chunk.numel - i : kGroup;
            Eight<float> x, y;
            xs.get(i, x, valid);
            ys.get(i, y, valid);
            bad |= (check_x && any_not_finite(x)) || (check_y && any_not_finite(y));
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) x.v[k] = axpby(a, x.v[k], b, y.v[k]);
            outs.set(i, x, valid);
        }
        if (bad) *found_inf = 1.0f;  // whichever thread comes last writes the same
    }
};

// Masters take the model's values in the elements whose bits are not those of the rounded master, in tensors of which one
// of two pairs of hashes differs. Lists: masters, params.
struct Take {
    const int64_t *now, *then;                // hashes: by place, and by row
    const int64_t *now_sample, *then_sample;  // the same of the samples, both by place, or null
    const int64_t* places;                    // by row; null where places are rows
    int32_t* taken;                           // by row: set to 1 where an element was taken, never cleared

    FP16OPT_HD bool is_needed() const { return true; }

    FP16OPT_HD bool moved(int64_t row) const {
        const int64_t place = places == nullptr ? row : places[row];
        return now[place] != then[row] || (now_sample != nullptr && now_sample[place] != then_sample[place]);
    }

    template <class T>
    static FP16OPT_HD bool group(float* master, const T* param, bool aligned, bool param_aligned, int valid) {
        Eight<float> value;
        Eight<T> model;
        load(value, static_cast<const float*>(master), aligned, valid);
        load(model, param, param_aligned, valid);
        bool differs = false;
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) {
            const bool other = narrow<T>(value.v[k]).bits != model.get(k).bits;
            value.v[k] = other ? widen(model.get(k)) : value.v[k];
            differs |= other;
        }
        if (differs) store(value, master, aligned, valid);
        return differs;
    }

    template <class T>
    FP16OPT_HD void work_as(const Lists& lists, const Chunk& chunk, int thread) const {
        float* master = lists.at<float>(0, chunk);
        const T* param = lists.at<const T>(1, chunk);
        const bool aligned = is_aligned(master), param_aligned = is_aligned(param);
        bool differs = false;
        for (int i = thread * kGroup; i < chunk.numel; i += kRow) {
            const int valid = chunk.numel - i < kGroup ? chunk.numel - i : kGroup;
            differs |= group(master + i, param + i, aligned, param_aligned, valid);
        }
        if (differs) taken[lists.table[chunk.tensor].row] = 1;
    }

    FP16OPT_HD void work(const Lists& lists, const Chunk& chunk, int thread) const {
        if (!moved(lists.table[chunk.tensor].row)) return;
        if (lists.dtype(1, chunk) == DType::half) return work_as<Half>(lists, chunk, thread);
        work_as<BFloat16>(lists, chunk, thread);
    }
};

FP16OPT_END
