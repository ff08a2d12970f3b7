// The CPU loops: functors applied to one chunk, 64 elements at a time. The last, incomplete block of a chunk is worked
// on in a padded copy by the same code, so body and tail give the same bits.
#pragma once

#include "../functors/accumulate.h"
#include "../functors/axpby.h"
#include "../functors/flags.h"
#include "../functors/lerp.h"
#include "../functors/scale.h"
#include "../functors/unscale.h"
#include "../backends/cpu_level.h"
#include "simd.h"

FP16OPT_BEGIN

typedef decltype(splat_for_sum(0.0f)) SumFloats;
constexpr int kVectors = int(sizeof(Block) / sizeof(Floats));
constexpr int kSumVectors = int(sizeof(SumBlock) / sizeof(SumFloats));
constexpr uint32_t kInfinity = 0x7f800000u;

// The running sums of a chunk.
struct Lanes {
    alignas(64) double sums[kLanes];
    int at = 0;
    bool tiny = false;  // the block before was; see add_groups_of_any_range
    int used;  // lanes that this chunk reaches; the others would only add zeros, which change no sum of squares

    explicit FP16OPT_HD Lanes(int64_t n) {
        const int64_t reached = (n + kBlock - 1) / kBlock * (kBlock / kGroup);
        used = reached < kLanes ? int(reached) : kLanes;
        memset(sums, 0, size_t(used) * sizeof(double));
    }
    // `Of`: as for group_term.
    template <class Of>
    FP16OPT_HD void add(const SumBlock& b) {
        if (FP16OPT_UNLIKELY(tiny) || !add_groups<Of>(b, sums + at)) tiny = add_groups_of_any_range<Of>(b, sums + at);
        at = (at + kBlock / kGroup) % kLanes;
    }
    FP16OPT_HD void unscale_squares(float inv_scale) {
        const double factor = square(double(inv_scale));
        if (FP16OPT_UNLIKELY(!is_finite(factor))) {  // the zeros of the other lanes become nans
            memset(sums + used, 0, size_t(kLanes - used) * sizeof(double));
            used = kLanes;
        }
        for (int i = 0; i < used; ++i) sums[i] = unscale(sums[i], factor);
    }
    FP16OPT_HD void add(const double (&b)[kBlock]) {
        for (int g = 0; g < kBlock / kGroup; ++g) {
            const double* e = b + g * kGroup;
            sums[at + g] += group_sum(square(e[0]), square(e[1]), square(e[2]), square(e[3]), square(e[4]), square(e[5]),
                                      square(e[6]), square(e[7]));
        }
        at = (at + kBlock / kGroup) % kLanes;
    }
    // The fixed tree. Overwrites the sums.
    FP16OPT_HD double total() {
        for (int width = kLanes / 2; width > 0; width /= 2) {
            const int with_partner = used - width < width ? used - width : width;
            for (int i = 0; i < with_partner; ++i) sums[i] += sums[i + width];
            used = used < width ? used : width;
        }
        return used > 0 ? sums[0] : 0.0;
    }
};

// A block with what lies behind `valid` elements set to zero: padding must neither be flagged nor summed.
FP16OPT_HD void clear_from(SumBlock& b, int valid) {
    alignas(64) float values[kBlock];
    store(values, b, false);
    for (int i = valid; i < kBlock; ++i) values[i] = 0.0f;
    load(values, b);
}

// The slow paths, for memory that holds something not finite.
FP16OPT_NOINLINE static uint32_t flags_of_sum(const SumBlock& unscaled, const SumBlock& before, const SumBlock& after) {
    float u[kBlock], s[kBlock], t[kBlock];
    store(u, unscaled, false);
    store(s, before, false);
    store(t, after, false);
    uint32_t flags = 0;
    for (int i = 0; i < kBlock; ++i) flags |= grad_flags(u[i], s[i], t[i]);
    return flags;
}
FP16OPT_NOINLINE static uint32_t flags_of_values(const float* unscaled, int64_t n) {
    uint32_t flags = 0;
    for (int64_t i = 0; i < n; ++i) flags |= grad_flags(unscaled[i]);
    return flags;
}

// kWrites false: only looks at what it would write.
template <class From, bool kWrites>
struct UnscaleLoop {
    float inv_scale;
    bool add, stream;
    Lanes lanes;
    uint32_t flags = 0;

    FP16OPT_HD void times_inv_scale(SumBlock& b) const {
        const SumFloats factor = splat_for_sum(inv_scale);
        for (int i = 0; i < kSumVectors; ++i) b.v[i] = unscale(b.v[i], factor);
    }
    FP16OPT_HD bool sums_stored() const { return kSumsStored<From> && !add; }

    // `valid` < kBlock only for the padded copy of a tail.
    FP16OPT_HD void block(const From* grad, float* out, int valid) {
        SumBlock product;
        load(grad, product);
        if (sums_stored()) {
            lanes.add<From>(product);
            if (!kWrites) return;
        }
        times_inv_scale(product);
        if (valid < kBlock) clear_from(product, valid);
        if (add) {
            SumBlock before, after;
            load(out, before);
            for (int i = 0; i < kSumVectors; ++i) after.v[i] = accumulate(before.v[i], product.v[i]);
            // Whatever is not finite in the product is not finite in the sum.
            if (FP16OPT_UNLIKELY(any_from(after, kInfinity))) flags |= flags_of_sum(product, before, after);
            product = after;
        }
        if (kWrites) store(out, product, stream);
        if (!sums_stored()) lanes.add<float>(product);
    }

    FP16OPT_HD double run(const From* grad, float* out, int64_t n) {
        int64_t i = 0;
        for (; i + kBlock <= n; i += kBlock) block(grad + i, kWrites ? out + i : nullptr, kBlock);
        if (stream) finish_streaming();
        stream = false;
        if (const int rest = int(n - i)) {
            From padded[kBlock] = {};
            float result[kBlock] = {};
            memcpy(padded, grad + i, size_t(rest) * sizeof(From));
            if (kWrites) memcpy(result, out + i, size_t(rest) * sizeof(float));
            block(padded, result, rest);
            if (kWrites) memcpy(out + i, result, size_t(rest) * sizeof(float));
        }
        if (sums_stored()) lanes.unscale_squares(inv_scale);
        // The squares of finite float32 stay finite in a double, and so does their sum over a chunk. So a finite sum
        // proves that all that was written is finite (of stored values: unless it is near what float32 can't square), and
        // only otherwise is the chunk read again.
        const double sumsq = lanes.total();
        const bool proves = sums_stored() ? sumsq < 0x1p255 : is_finite(sumsq);
        if (FP16OPT_UNLIKELY(!proves && !add)) find_flags(grad, out, n);
        return sumsq;
    }

    // `out` may be `grad`, which then holds products by now.
    FP16OPT_NOINLINE void find_flags(const From* grad, const float* out, int64_t n) {
        if (kWrites) {
            flags = flags_of_values(out, n);
            return;
        }
        for (int64_t i = 0; i < n; i += kBlock) {
            From padded[kBlock] = {};
            float products[kBlock];
            const int valid = n - i < kBlock ? int(n - i) : kBlock;
            memcpy(padded, grad + i, size_t(valid) * sizeof(From));
            SumBlock product;
            load(padded, product);
            times_inv_scale(product);
            store(products, product, false);
            flags |= flags_of_values(products, valid);
        }
    }
};

// Unscaled and clipped, in two roundings; nothing is looked for.
template <class From>
struct UnscaleClippedLoop {
    SumFloats inv_scale, factor;
    bool stream;

    FP16OPT_HD void block(const From* grad, float* out) {
        SumBlock b;
        load(grad, b);
        for (int i = 0; i < kSumVectors; ++i) b.v[i] = scale(unscale(b.v[i], inv_scale), factor);
        store(out, b, stream);
    }

    FP16OPT_HD void run(const From* grad, float* out, int64_t n) {
        int64_t i = 0;
        for (; i + kBlock <= n; i += kBlock) block(grad + i, out + i);
        if (stream) finish_streaming();
        stream = false;
        if (const int rest = int(n - i)) {
            From padded[kBlock] = {};
            float result[kBlock];
            memcpy(padded, grad + i, size_t(rest) * sizeof(From));
            block(padded, result);
            memcpy(out + i, result, size_t(rest) * sizeof(float));
        }
    }
};

// float64 gradients of float64 parameters: rare, so left to the compiler.
struct UnscaleWideLoop {
    double factor;
    bool add;
    Lanes lanes;
    uint32_t flags = 0;

    FP16OPT_HD void run(const double* grad, double* out, int64_t n) {
        for (int64_t i = 0; i < n; i += kBlock) {
            double block[kBlock] = {};
            const int valid = n - i < kBlock ? int(n - i) : kBlock;
            for (int j = 0; j < valid; ++j) {
                const double product = unscale(grad[i + j], factor);
                const double before = add ? out[i + j] : 0.0;
                block[j] = add ? accumulate(before, product) : product;
                flags |= add ? grad_flags(product, before, block[j]) : grad_flags(product);
            }
            if (out != nullptr) memcpy(out + i, block, size_t(valid) * sizeof(double));
            lanes.add(block);
        }
    }
};

template <class From>
FP16OPT_HD double sum_of_squares(const From* values, int64_t n) {
    Lanes lanes(n);
    int64_t i = 0;
    SumBlock b;
    for (; i + kBlock <= n; i += kBlock) {
        load(values + i, b);
        lanes.add<From>(b);
    }
    if (const int rest = int(n - i)) {
        From padded[kBlock] = {};
        memcpy(padded, values + i, size_t(rest) * sizeof(From));
        load(padded, b);
        lanes.add<From>(b);
    }
    return lanes.total();
}

FP16OPT_HD double sum_of_squares(const double* values, int64_t n) {
    Lanes lanes(n);
    for (int64_t i = 0; i < n; i += kBlock) {
        double block[kBlock] = {};
        memcpy(block, values + i, size_t(n - i < kBlock ? n - i : kBlock) * sizeof(double));
        lanes.add(block);
    }
    return lanes.total();
}

// Memory of a dtype that is known only at run time, of 16 bits or float32. One branch for 64 elements costs nothing beside
// them.
template <class B>
FP16OPT_HD void load_as(DType of, const char* from, B& b) {
    switch (of) {
        case DType::half: return load(reinterpret_cast<const Half*>(from), b);
        case DType::bfloat16: return load(reinterpret_cast<const BFloat16*>(from), b);
        default: return load(reinterpret_cast<const float*>(from), b);
    }
}

// Stores a block in the type of the memory.
FP16OPT_HD void put(float* to, const Block& b) { store(to, b); }
template <class To>
FP16OPT_HD void put(To* to, const Block& b) {
    Narrow n;
    narrow_to(To{}, b, n);
    store(static_cast<void*>(to), n, false);
}

template <class T>
FP16OPT_HD void scale_values(T* values, int64_t n, float factor) {
    const Floats by = splat(factor);
    auto block = [by](T* at) {
        Block b;
        load(static_cast<const T*>(at), b);
        for (int i = 0; i < kVectors; ++i) b.v[i] = scale(b.v[i], by);
        put(at, b);
    };
    int64_t i = 0;
    for (; i + kBlock <= n; i += kBlock) block(values + i);
    if (const int rest = int(n - i)) {
        T padded[kBlock] = {};
        memcpy(padded, values + i, size_t(rest) * sizeof(T));
        block(padded);
        memcpy(values + i, padded, size_t(rest) * sizeof(T));
    }
}

FP16OPT_HD void scale_values(double* values, int64_t n, float factor) {
    for (int64_t i = 0; i < n; ++i) values[i] = scale(values[i], double(factor));
}

// Running averages take values in: they go a part of the way, from the nearer end. See functors/lerp.h.
template <class From>
FP16OPT_HD void lerp_values(float* averages, const From* values, int64_t n, double of_way, bool from_average) {
    const Floats part = splat(float(of_way));
    auto block = [=](float* average, const From* value) {
        Block a, v;
        load(static_cast<const float*>(average), a);
        load(value, v);
        for (int i = 0; i < kVectors; ++i) {
            a.v[i] = from_average ? lerp(a.v[i], v.v[i], part) : lerp(v.v[i], a.v[i], part);
        }
        store(average, a);
    };
    int64_t i = 0;
    for (; i + kBlock <= n; i += kBlock) block(averages + i, values + i);
    if (const int rest = int(n - i)) {
        float result[kBlock] = {};
        From padded[kBlock] = {};
        memcpy(result, averages + i, size_t(rest) * sizeof(float));
        memcpy(padded, values + i, size_t(rest) * sizeof(From));
        block(result, padded);
        memcpy(averages + i, result, size_t(rest) * sizeof(float));
    }
}

FP16OPT_HD void lerp_values(double* averages, const double* values, int64_t n, double part, bool from_average) {
    for (int64_t i = 0; i < n; ++i) {
        averages[i] = from_average ? lerp(averages[i], values[i], part) : lerp(values[i], averages[i], part);
    }
}

template <class To>
struct CastLoop {
    bool stream;
    uint32_t flags = 0;

    FP16OPT_HD void round(const float* master, Narrow& narrow) {
        Block b;
        load(master, b);
        if (FP16OPT_UNLIKELY(any_from(b, first_infinite<To>()))) note(master);
        narrow_to(To{}, b, narrow);
    }
    FP16OPT_NOINLINE void note(const float* master) {
        for (int i = 0; i < kBlock; ++i) flags |= cast_flags(master[i], first_infinite<To>());
    }

    FP16OPT_HD void run(const float* master, To* param, int64_t n) {
        int64_t i = 0;
        Narrow narrow;
        for (; i + kBlock <= n; i += kBlock) {
            round(master + i, narrow);
            store(static_cast<void*>(param + i), narrow, stream);
        }
        if (stream) finish_streaming();
        if (const int rest = int(n - i)) {
            float padded[kBlock] = {};
            To result[kBlock];
            memcpy(padded, master + i, size_t(rest) * sizeof(float));
            round(padded, narrow);
            store(static_cast<void*>(result), narrow, false);
            memcpy(param + i, result, size_t(rest) * sizeof(To));
        }
    }
};

FP16OPT_END
