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

template <class Master, class Weight>
struct CompareLoop {
    Lanes masters, distances, squares, changes, ulps;
    int moved = 0, lost = 0;

    explicit FP16OPT_HD CompareLoop(int64_t n) : masters(n), distances(n), squares(n), changes(n), ulps(n) {}

    FP16OPT_HD void block(const Master* master, const Weight* weight) {
        SumBlock value, held;
        load(master, value);
        load(weight, held);
        for (int i = 0; i < kSumVectors; ++i) held.v[i] = value.v[i] - held.v[i];
        masters.add<float>(value);
        distances.add<float>(held);
    }

    FP16OPT_HD void group(const Master* master, const float* before, int lane, int valid) {
        float now[kGroup] = {}, then[kGroup] = {};
        for (int i = 0; i < valid; ++i) {
            now[i] = widen(master[i]);
            then[i] = before[i];
        }
        const GroupOfStep step = group_of_step<Weight>(then, now, valid);
        squares.sums[lane] += step.sumsq;
        changes.sums[lane] += step.change;
        ulps.sums[lane] += step.ulp;
        moved += step.moved;
        lost += step.lost;
    }

    FP16OPT_HD void run(const Master* master, const Weight* weight, const float* before, bool whole, int64_t start, int64_t n) {
        const int64_t stride = whole ? 1 : kMeasuredStride, first = start / kGroup;
        int64_t next = (first + stride - 1) / stride * stride;  // group of the tensor that is measured next
        for (int64_t i = 0; i < n; i += kBlock) {
            if (n - i >= kBlock) {
                block(master + i, weight + i);
            } else {
                Master values[kBlock] = {};
                Weight weights[kBlock] = {};
                memcpy(values, master + i, size_t(n - i) * sizeof(Master));
                memcpy(weights, weight + i, size_t(n - i) * sizeof(Weight));
                block(values, weights);
            }
            const int64_t end = i + kBlock < n ? i + kBlock : n;
            for (; (next - first) * kGroup < end; next += stride) {
                const int64_t at = (next - first) * kGroup;
                const int valid = n - at < kGroup ? int(n - at) : kGroup;
                group(master + at, before + next / stride * kGroup, int((next - first) % kLanes), valid);
            }
        }
    }

    FP16OPT_HD Numbers found() {
        return {{masters.total(), distances.total(), squares.total(), changes.total(), ulps.total(), double(moved), double(lost)}};
    }
};

FP16OPT_END
