// The numbers of reports as programs for a GPU: several for each tensor, by the fixed tree of cuda.cuh.
#pragma once

#include "../functors/measure.h"
#include "cuda_operations.cuh"

FP16OPT_BEGIN

// The memory that the threads of a block share.
struct NumbersRoom {
    double of[kMostNumbers][kThreads];
    double total[kMostNumbers];
    bool tensor_done;
};

FP16OPT_HD void clear(Numbers& numbers) {
    FP16OPT_UNROLL
    for (int k = 0; k < kMostNumbers; ++k) numbers.v[k] = 0.0;
}

// A block's part of an operation with several numbers for each tensor that has elements. `Operation` has:
//   count, largest                           how many numbers, and which is the largest of its parts, or -1
//   Numbers work(lists, chunk, thread)       one thread's part of a chunk
//   void report(entry, numbers)              one thread: a tensor is complete
template <class Operation>
FP16OPT_HD void run_measuring(const Operation& operation, const Lists& lists, int64_t block, NumbersRoom& s) {
    constexpr int count = Operation::count, largest = Operation::largest;
    if (block >= lists.chunk_count) return;
    const Chunk chunk = lists.chunks[block];
    const int64_t first = lists.table[chunk.tensor].first_chunk, end = lists.table[chunk.tensor + 1].first_chunk;
    double* partial = reinterpret_cast<double*>(lists.partial);
    for_threads([&](int t) {
        const Numbers found = operation.work(lists, chunk, t);
        FP16OPT_UNROLL
        for (int k = 0; k < count; ++k) s.of[k][t] = found.v[k];
    });
    FP16OPT_UNROLL
    for (int width = kThreads / 2; width > 0; width /= 2) {
        for_threads([&](int t) {
            if (t >= width) return;
            FP16OPT_UNROLL
            for (int k = 0; k < count; ++k) s.of[k][t] = joined(k == largest, s.of[k][t], s.of[k][t + width]);
        });
    }
    for_threads([&](int t) {
        if (t != 0) return;
        s.tensor_done = true;
        for (int k = 0; k < count; ++k) s.total[k] = s.of[k][0];
        if (end - first == 1) return;
        for (int k = 0; k < count; ++k) partial[block * kMostNumbers + k] = s.of[k][0];
        s.tensor_done = is_last(lists.counters + chunk.tensor, uint32_t(end - first));
    });
    if (!s.tensor_done) return;
    if (end - first > 1) {
        for_threads([&](int t) {
            if (t < count) s.total[t] = 0.0;
        });
        for (int64_t base = first; base < end; base += kThreads) {
            const int chunks = end - base < kThreads ? int(end - base) : kThreads;
            for_threads([&](int t) {
                if (t >= chunks) return;
                for (int k = 0; k < count; ++k) s.of[k][t] = read_fresh(partial + (base + t) * kMostNumbers + k);
            });
            for_threads([&](int t) {  // one thread for each number, in the order of the chunks
                if (t >= count) return;
                double total = s.total[t];
                for (int c = 0; c < chunks; ++c) total = joined(t == largest, total, s.of[t][c]);
                s.total[t] = total;
            });
        }
    }
    for_threads([&](int t) {
        if (t == 0) operation.report(lists.table[chunk.tensor], s.total);
    });
}

// Lists: grads. `numbers`: kMeasured for each row.
struct Measure {
    double* numbers;
    static constexpr int count = kMeasured, largest = kLargest;

    static FP16OPT_HD int magnitude_of(const Eight<Half>& raw, int i) { return raw.get(i).bits & 0x7fff; }
    static FP16OPT_HD int magnitude_of(const Eight<BFloat16>& raw, int i) { return raw.get(i).bits & 0x7fff; }
    static FP16OPT_HD int magnitude_of(const Eight<float>&, int) { return 1; }

    template <class From>
    static FP16OPT_HD Numbers work_as(const Lists& lists, const Chunk& chunk, int thread) {
        const From* grad = lists.at<const From>(0, chunk);
        const bool aligned = is_aligned(grad);
        double sumsq = 0.0;
        uint32_t most = 0;
        int zero = 0, below = 0, near = 0;
        for_groups<Eight<From>, rows_ahead<From>()>(
            chunk.numel, thread, true, [&](int i, Eight<From>& raw, int left) { load(raw, grad + i, aligned, left); },
            [&](int, const Eight<From>& raw, int left) {
                Eight<float> wide;
                widen_to(raw, wide);
                sumsq += group_term<From>(wide.v);
                FP16OPT_UNROLL
                for (int i = 0; i < kGroup; ++i) {
                    const uint32_t bits = magnitude_bits(wide.v[i]);
                    most = most < bits ? bits : most;
                    const int m = magnitude_of(raw, i);
                    zero += i < left && m == 0;
                    below += i < left && m < Magnitudes<From>::kNormal;
                    near += m >= Magnitudes<From>::kLarge;
                }
            });
        Numbers found;
        clear(found);
        found.v[kGradSumsq] = sumsq;
        found.v[kLargest] = double(most);
        found.v[kZero] = double(zero);
        found.v[kSubnormal] = double(below - zero);
        found.v[kNearOverflow] = double(near);
        return found;
    }

    FP16OPT_HD Numbers work(const Lists& lists, const Chunk& chunk, int thread) const {
        switch (lists.dtype(0, chunk)) {
            case DType::half: return work_as<Half>(lists, chunk, thread);
            case DType::bfloat16: return work_as<BFloat16>(lists, chunk, thread);
            default: return work_as<float>(lists, chunk, thread);
        }
    }

    FP16OPT_HD void report(const Entry& entry, const double* found) const {
        double* row = numbers + entry.row * kMeasured;
        for (int k = 0; k < kMeasured; ++k) row[k] = found[k];
        row[kLargest] = double(bit_cast<float>(uint32_t(found[kLargest])));
    }
};

static_assert(kMeasuredWhole == kSampledWhole, "an entry without a lattice is a tensor that is measured whole");

// Lists: masters, weights. `before` holds the groups that are measured of each tensor, from `offsets`, by row, on;
// `numbers`: kCompared for each row.
struct Compare {
    const float* before;
    const int64_t* offsets;
    double* numbers;
    static constexpr int count = kCompared, largest = -1;

    template <class Master, class Weight>
    FP16OPT_HD Numbers work_as(const Lists& lists, const Chunk& chunk, int thread) const {
        const Master* master = lists.at<const Master>(0, chunk);
        const Weight* weight = lists.at<const Weight>(1, chunk);
        const Entry& entry = lists.table[chunk.tensor];
        const int64_t stride = entry.stride == 0 ? 1 : kMeasuredStride, first = chunk.start / kGroup;
        const float* then = in_global_memory(before) + offsets[entry.row];
        const bool aligned = is_aligned(master), weight_aligned = is_aligned(weight), then_aligned = is_aligned(then);
        Numbers found;
        clear(found);
        int moved = 0, lost = 0;
        for (int i = thread * kGroup; i < chunk.numel; i += kRow) {
            const int left = chunk.numel - i < kGroup ? chunk.numel - i : kGroup;
            Eight<Master> value;
            Eight<Weight> held;
            load(value, master + i, aligned, left);
            load(held, weight + i, weight_aligned, left);
            Eight<float> now, away;
            widen_to(value, now);
            widen_to(held, away);
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) away.v[k] = now.v[k] - away.v[k];
            found.v[kMasterSumsq] += group_term<float>(now.v);
            found.v[kDistanceSumsq] += group_term<float>(away.v);
            const int64_t group = first + i / kGroup;
            if (group % stride != 0) continue;
            Eight<float> old;
            load(old, then + group / stride * kGroup, then_aligned, left);
            const GroupOfStep step = group_of_step<Weight>(old.v, now.v, left);
            found.v[kChangeSumsq] += step.sumsq;
            found.v[kChange] += step.change;
            found.v[kUlp] += step.ulp;
            moved += step.moved;
            lost += step.lost;
        }
        found.v[kMoved] = double(moved);
        found.v[kLost] = double(lost);
        return found;
    }

    FP16OPT_HD Numbers work(const Lists& lists, const Chunk& chunk, int thread) const {
        const DType of = lists.dtype(0, chunk), held = lists.dtype(1, chunk);
        if (of == DType::half) return work_as<Half, Half>(lists, chunk, thread);
        if (of == DType::bfloat16) return work_as<BFloat16, BFloat16>(lists, chunk, thread);
        if (held == DType::half) return work_as<float, Half>(lists, chunk, thread);
        if (held == DType::bfloat16) return work_as<float, BFloat16>(lists, chunk, thread);
        return work_as<float, float>(lists, chunk, thread);
    }

    FP16OPT_HD void report(const Entry& entry, const double* found) const {
        double* row = numbers + entry.row * kCompared;
        for (int k = 0; k < kCompared; ++k) row[k] = found[k];
    }
};

FP16OPT_END
