// The CPU loops for the numbers of reports: stretches of a chunk that stay in the first-level cache between what is done
// with them.
#pragma once

#include "../functors/measure.h"
#include "cpu.h"

FP16OPT_BEGIN

constexpr int64_t kStretch = 4096;  // elements; sums of as many ones fit into 16 bits

// What is counted in a stretch, in loops that a compiler vectorises.
template <class From>
FP16OPT_NOINLINE static void count_stretch(const From* grad, int n, Numbers& found) {
    int16_t largest = 0, zero = 0, below = 0, near = 0;
    for (int i = 0; i < n; ++i) {
        const int16_t m = int16_t(grad[i].bits & 0x7fff);
        largest = largest < m ? m : largest;
        zero = int16_t(zero + (m == 0));
        below = int16_t(below + (m < int16_t(Magnitudes<From>::kNormal)));
        near = int16_t(near + (m >= int16_t(Magnitudes<From>::kLarge)));
    }
    found.v[kLargest] = joined(true, found.v[kLargest], double(magnitude_bits(widen(From{uint16_t(largest)}))));
    found.v[kZero] += double(zero);
    found.v[kSubnormal] += double(below - zero);
    found.v[kNearOverflow] += double(near);
}
FP16OPT_NOINLINE static void count_stretch(const float* grad, int n, Numbers& found) {
    int32_t largest = 0;
    for (int i = 0; i < n; ++i) {
        const int32_t m = int32_t(magnitude_bits(grad[i]));
        largest = largest < m ? m : largest;
    }
    found.v[kLargest] = joined(true, found.v[kLargest], double(largest));
}

template <class From>
FP16OPT_HD Numbers measured(const From* grad, int64_t n) {
    Numbers found{};
    Lanes lanes(n);
    for (int64_t start = 0; start < n; start += kStretch) {
        const int length = int(n - start < kStretch ? n - start : kStretch);
        const From* from = grad + start;
        SumBlock b;
        int i = 0;
        for (; i + kBlock <= length; i += kBlock) {
            load(from + i, b);
            lanes.add<From>(b);
        }
        if (i < length) {
            From padded[kBlock] = {};
            memcpy(padded, from + i, size_t(length - i) * sizeof(From));
            load(padded, b);
            lanes.add<From>(b);
        }
        count_stretch(from, length, found);
    }
    found.v[kGradSumsq] = lanes.total();
    return found;
}

// Masters and weights of dtypes that are known only at run time: the arithmetic between the branches is the same.
struct CompareLoop {
    DType of_master, of_weight;
    Lanes masters, distances, squares, changes, ulps;
    int moved = 0, lost = 0;

    FP16OPT_HD CompareLoop(DType master, DType weight, int64_t n)
        : of_master(master), of_weight(weight), masters(n), distances(n), squares(n), changes(n), ulps(n) {}

    FP16OPT_HD void block(const char* master, const char* weight) {
        SumBlock value, held;
        load_as(of_master, master, value);
        load_as(of_weight, weight, held);
        for (int i = 0; i < kSumVectors; ++i) held.v[i] = value.v[i] - held.v[i];
        masters.add<float>(value);
        distances.add<float>(held);
    }

    FP16OPT_HD float master_at(const char* master, int i) const {
        switch (of_master) {
            case DType::half: return widen(reinterpret_cast<const Half*>(master)[i]);
            case DType::bfloat16: return widen(reinterpret_cast<const BFloat16*>(master)[i]);
            default: return reinterpret_cast<const float*>(master)[i];
        }
    }
    FP16OPT_HD GroupOfStep step_of(const float* then, const float* now, int valid) const {
        switch (of_weight) {
            case DType::half: return group_of_step<Half>(then, now, valid);
            case DType::bfloat16: return group_of_step<BFloat16>(then, now, valid);
            default: return group_of_step<float>(then, now, valid);
        }
    }
    FP16OPT_NOINLINE void group(const char* master, const float* before, int lane, int valid) {
        float now[kGroup] = {}, then[kGroup] = {};
        for (int i = 0; i < valid; ++i) {
            now[i] = master_at(master, i);
            then[i] = before[i];
        }
        const GroupOfStep step = step_of(then, now, valid);
        squares.sums[lane] += step.sumsq;
        changes.sums[lane] += step.change;
        ulps.sums[lane] += step.ulp;
        moved += step.moved;
        lost += step.lost;
    }

    FP16OPT_HD void run(const char* master, const char* weight, const float* before, bool whole, int64_t start, int64_t n) {
        const int64_t master_size = item_size(of_master), weight_size = item_size(of_weight);
        const int64_t stride = whole ? 1 : kMeasuredStride, first = start / kGroup;
        int64_t next = (first + stride - 1) / stride * stride;  // group of the tensor that is measured next
        for (int64_t i = 0; i < n; i += kBlock) {
            const char* masters_from = master + i * master_size;
            const char* weights_from = weight + i * weight_size;
            char padded[2][kBlock * sizeof(float)];
            if (n - i < kBlock) {
                memset(padded, 0, sizeof(padded));
                memcpy(padded[0], masters_from, size_t((n - i) * master_size));
                memcpy(padded[1], weights_from, size_t((n - i) * weight_size));
                masters_from = padded[0];
                weights_from = padded[1];
            }
            block(masters_from, weights_from);
            const int64_t end = i + kBlock < n ? i + kBlock : n;
            for (; (next - first) * kGroup < end; next += stride) {
                const int64_t at = (next - first) * kGroup;
                const int valid = n - at < kGroup ? int(n - at) : kGroup;
                group(master + at * master_size, before + next / stride * kGroup, int((next - first) % kLanes), valid);
            }
        }
    }

    FP16OPT_HD Numbers found() {
        return {{masters.total(), distances.total(), squares.total(), changes.total(), ulps.total(), double(moved), double(lost)}};
    }
};

FP16OPT_END
