// Masters to weights and remainders, and back, as programs for cuda.cuh.
#pragma once

#include "cuda_masters.cuh"

FP16OPT_BEGIN

// Lists: masters, models, remainders.
struct Split : Marking {
    int32_t* overflow;

    FP16OPT_HD Found work(const Lists& lists, const Chunk& chunk, int thread) const {
        const Singles masters(lists, 0, chunk);
        const Masters to(lists, chunk, 2, 1);
        const ChunkMarks marks(*this, lists, chunk);
        Found found{0.0, 0, 0};
        for_each_group(chunk.numel, thread, [&](int i, int left) {
            Eight<float> p;
            masters.get(i, p, left);
            to.set<true>(i, p, left, marks, found);
        });
        return found;
    }

    FP16OPT_HD void report(const Entry& entry, const Found& found) const {
        overflow[entry.row] = int32_t(found.flags);
        add_guard(entry, found);
    }
    FP16OPT_HD void finish(Shared&) const {}
};

// Lists: models, remainders, outs.
struct Join {
    FP16OPT_HD bool is_needed() const { return true; }

    FP16OPT_HD void work(const Lists& lists, const Chunk& chunk, int thread) const {
        const Masters from(lists, chunk, 1, 0);
        const Singles outs(lists, 2, chunk);
        for_each_group(chunk.numel, thread, [&](int i, int left) {
            Words raw;
            Eight<float> p;
            from.get(i, raw, left);
            from.values(raw, p);
            outs.set(i, p, left);
        });
    }
};

// Weights that something else wrote stand for themselves: remainders are made anew in tensors whose digests differ.
// Lists: models, remainders.
struct Renew {
    const int64_t *now, *then;  // digests, by row
    int32_t* taken;             // by row: set to 1 where remainders were made anew, never cleared

    FP16OPT_HD bool is_needed() const { return true; }

    FP16OPT_HD void work(const Lists& lists, const Chunk& chunk, int thread) const {
        const int64_t row = lists.table[chunk.tensor].row;
        if (now[row] == then[row]) return;
        const bool half = lists.dtype(0, chunk) == DType::half;
        if (lists.dtype(1, chunk) == DType::byte) {
            renew(lists, chunk, thread, lists.at<uint8_t>(1, chunk),
                  [=](uint16_t weight) { return plain_remainder24(half, weight); });
        } else {
            renew(lists, chunk, thread, lists.at<Half>(1, chunk),
                  [=](uint16_t weight) { return Half{plain_remainder(half, weight)}; });
        }
        if (thread == 0) taken[row] = 1;
    }

    template <class Rest, class Plain>
    static FP16OPT_HD void renew(const Lists& lists, const Chunk& chunk, int thread, Rest* remainders, Plain&& plain) {
        const Half* models = lists.at<const Half>(0, chunk);
        const bool aligned = is_aligned(models), remainders_aligned = is_aligned(remainders);
        for_each_group(chunk.numel, thread, [&](int i, int left) {
            Eight<Half> weights;
            Eight<Rest> rest;
            load(weights, models + i, aligned, left);
            rest.clear();
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) rest.set(k, plain(weights.get(k).bits));
            store(rest, remainders + i, remainders_aligned, left);
        });
    }
};

FP16OPT_END
