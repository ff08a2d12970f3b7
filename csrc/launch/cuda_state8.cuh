// The steps whose state is kept in 8 bits, as programs for cuda.cuh. A block of 128 elements with one scale is the work of 16
// neighbouring threads: in one phase they step, and leave in shared memory what is to be coded, in the next they know the
// largest of it.
#pragma once

#include "../functors/ratio8.h"
#include "cuda_steps.cuh"

FP16OPT_BEGIN

constexpr int kThreadsOfBlock = kStateBlock / kGroup;
static_assert(kRow % kStateBlock == 0 && kChunk % kStateBlock == 0 && kScaled == kStateBlock, "rows and chunks begin where blocks do");

// What is to be coded of one row: a thread's eight elements lie kThreads apart, so that neighbours meet no bank twice.
struct CodedRow {
    float values[kGroup * kThreads];
    float largest[kThreads];

    // Of the block of 128 elements that `thread` works on.
    FP16OPT_HD float largest_of_block(int thread) const {
        const int first = thread / kThreadsOfBlock * kThreadsOfBlock;
        float most = largest[first];
        for (int k = 1; k < kThreadsOfBlock; ++k) most = largest[first + k] > most ? largest[first + k] : most;
        return most;
    }
};

// Memory of codes.
class CodeBytes {
public:
    FP16OPT_HD CodeBytes(const Lists& lists, int list, const Chunk& chunk)
        : first_(lists.at<uint8_t>(list, chunk)), aligned_(is_aligned(first_)) {}
    FP16OPT_HD void get(int i, Eight<uint8_t>& codes, int left) const {
        load(codes, static_cast<const uint8_t*>(first_ + i), aligned_, left);
    }
    FP16OPT_HD void set(int i, const Eight<uint8_t>& codes, int left) const { store_alone(codes, first_ + i, aligned_, left); }

private:
    uint8_t* first_;
    bool aligned_;
};

FP16OPT_HD uint32_t upper_byte(uint8_t code) { return uint32_t(code) << 24; }

// What both steps have. Behind the lists of a step comes that of the scales.
struct CodedStep : StepCommon {
    typedef CodedRow Rows;

    // Where a chunk lies. A thread reads addresses and dtypes once: from row to row its stores might have changed them, for all
    // that the compiler knows.
    struct Memory {
        Grads grads;
        Masters masters;
        ChunkMarks marks;
        CodeBytes first, second;
        float* scales;
    };
    FP16OPT_HD Memory memory_of(const Lists& lists, const Chunk& chunk, int second_list, int own_scales) const {
        const int scale_list = model_list < 0 ? own_scales : model_list + 1;
        return {{lists, chunk},
                {lists, chunk, 1, model_list, number},
                {*this, lists, chunk},
                {lists, 2, chunk},
                {lists, second_list, chunk},
                lists.at<float>(scale_list, Chunk{chunk.block, chunk.tensor, chunk.numel, 0, 0})};
    }
    FP16OPT_HD uint32_t dither(const Chunk& chunk, int i) const { return dither_at(chunk.index + uint32_t(i), number); }
};

// One step of Adam or AdamW. The state's lists: exp_avg_codes, exp_avg_sq_codes.
struct Adam8Step : CodedStep {
    const Adam8Group* groups;
    struct Terms {
        AdamTerms<float> adam;
        float unit, units;
    };
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 750
    static constexpr int blocks = 2;  // the last compiler for these cards spills with three
#else
    static constexpr int blocks = 3;  // what it waits for is arithmetic: with two an H100 takes a quarter longer
#endif

    FP16OPT_HD Memory memory(const Lists& lists, const Chunk& chunk) const { return memory_of(lists, chunk, 3, 4); }

    FP16OPT_HD Terms terms(const Lists&, const Chunk& chunk) const {
        const Member& member = members[chunk.tensor];
        const Adam8Group& g = groups[member.group];
        return Terms{terms_of<Adam>(factors(g.maximize != 0), g, count(member)), g.limit * kRatioUnit, kRatios * (1.0f / g.limit)};
    }

    FP16OPT_HD Found advance(const Terms& terms, const Memory& memory, const Chunk& chunk, int i, int left, int thread,
                             Rows& rows) const {
        const float scale = memory.scales[i / kStateBlock];
        Words raw_grad, raw_master;
        Eight<float> g, p;
        Eight<uint8_t> ratios, shares, made;
        memory.grads.get(i, raw_grad, left);
        memory.masters.get(i, raw_master, left);
        memory.first.get(i, ratios, left);
        memory.second.get(i, shares, left);
        memory.grads.widen_to(raw_grad, g);
        memory.masters.values(raw_master, p);
        made.clear();
        float most = 0.0f;
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) {
            const float was = root_of_code(uint32_t(shares.get(k)), scale);
            float m = signed_of_code(upper_byte(ratios.get(k)), was, terms.unit), v = was * was;
            adam_moments(terms.adam, g.v[k], p.v[k], m, v);
            const float second_root = root(v), now = root_to_keep(second_root);
            adam_move(terms.adam, p.v[k], m, second_root);
            m = moment_to_keep(m);
            const float ratio = ratio_or_zero(magnitude_of(m, uint32_t()), now);
            made.set(k, uint8_t(signed_code(ratio_steps(ratio, terms.units, ratio_dither(dither(chunk, i + k))), m)));
            const float kept = k < left ? now : 0.0f;
            rows.values[k * kThreads + thread] = kept;
            most = kept > most ? kept : most;
        }
        rows.largest[thread] = most;
        memory.first.set(i, made, left);
        Found found{0.0, 0, 0};
        memory.masters.set(i, p, left, memory.marks, found);
        return found;
    }

    FP16OPT_HD void keep(const Memory& memory, const Chunk& chunk, int i, int left, int thread, const Rows& rows) const {
        const float largest = rows.largest_of_block(thread);
        const bool zero = !(largest >= kLeastScale);
        const float per_scale = 1.0f / largest;
        Eight<uint8_t> made;
        made.clear();
        if (zero) {
            memory.first.set(i, made, left);
        } else {
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) {
                const float kept = rows.values[k * kThreads + thread];
                const float shares = root_shares(root(kept * per_scale), dither(chunk, i + k));
                made.set(k, uint8_t(root_code(to_words(shares), kept)));
            }
        }
        memory.second.set(i, made, left);
        if (i % kStateBlock == 0) memory.scales[i / kStateBlock] = zero ? 0.0f : largest;
    }
};

// One step of SGD. The state's list: momentum_codes; lists.add tells where they hold nothing yet.
struct Sgd8Step : CodedStep {
    const SgdGroup* groups;
    struct Terms {
        SgdTerms<float> sgd;
        bool first;
    };
    static constexpr int blocks = 3;

    FP16OPT_HD Memory memory(const Lists& lists, const Chunk& chunk) const { return memory_of(lists, chunk, 2, 3); }

    FP16OPT_HD Terms terms(const Lists& lists, const Chunk& chunk) const {
        const SgdGroup& g = groups[members[chunk.tensor].group];
        const bool first = lists.add[chunk.tensor] != 0;
        return Terms{terms_of<Sgd>(factors(g.maximize != 0), g, 0.0f), first};
    }

    FP16OPT_HD Found advance(const Terms& terms, const Memory& memory, const Chunk& chunk, int i, int left, int thread,
                             Rows& rows) const {
        const float scale = memory.scales[i / kStateBlock];
        Words raw_grad, raw_master;
        Eight<float> g, p;
        Eight<uint8_t> codes;
        memory.grads.get(i, raw_grad, left);
        memory.masters.get(i, raw_master, left);
        memory.first.get(i, codes, left);
        memory.grads.widen_to(raw_grad, g);
        memory.masters.values(raw_master, p);
        float most = 0.0f;
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) {
            float momentum = 0.0f;
            if (terms.first) {
                sgd<true>(terms.sgd, g.v[k], p.v[k], &momentum);
            } else {
                momentum = signed_of_code(upper_byte(codes.get(k)), scale, kRatioUnit);
                sgd<false>(terms.sgd, g.v[k], p.v[k], &momentum);
            }
            momentum = moment_to_keep(momentum);
            rows.values[k * kThreads + thread] = momentum;
            const float size = smaller(magnitude_of(momentum, uint32_t()), kLargestMomentum);
            most = k < left && size > most ? size : most;
        }
        rows.largest[thread] = most;
        Found found{0.0, 0, 0};
        memory.masters.set(i, p, left, memory.marks, found);
        return found;
    }

    FP16OPT_HD void keep(const Memory& memory, const Chunk& chunk, int i, int left, int thread, const Rows& rows) const {
        const float largest = rows.largest_of_block(thread);
        const bool zero = !(largest >= kLeastMomentum);
        Eight<uint8_t> made;
        made.clear();
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) {
            const uint32_t dither_low = ratio_dither(dither(chunk, i + k));
            const float value = rows.values[k * kThreads + thread];
            const float share = ratio_or_zero(magnitude_of(value, uint32_t()), largest);
            made.set(k, uint8_t(zero ? 0u : signed_code(ratio_steps(share, kRatios, dither_low), value)));
        }
        memory.first.set(i, made, left);
        if (i % kStateBlock == 0) memory.scales[i / kStateBlock] = zero ? 0.0f : largest;
    }
};

// Row after row in two phases: see above.
template <class Step>
FP16OPT_HD void work_in_rows(const WithTerms<Step>& o, const Lists& lists, const Chunk& chunk, Shared& s) {
    const CodedStep::Memory memory = o.step.memory(lists, chunk);
    for (int row = 0; row < chunk.numel; row += kRow) {
        for_threads([&](int t) {
            const int i = row + t * kGroup, left = chunk.numel - i;
            if (row == 0) put_thread<Step::finds>(s, t, Found{0.0, 0, 0});
            o.rows.largest[t] = 0.0f;
            if (left > 0) add_thread<Step::finds>(s, t, o.step.advance(o.terms, memory, chunk, i, left, t, o.rows));
        });
        for_threads([&](int t) {
            const int i = row + t * kGroup, left = chunk.numel - i;
            if (left > 0) o.step.keep(memory, chunk, i, left, t, o.rows);
        });
    }
}
FP16OPT_HD void work_on(const WithTerms<Adam8Step>& step, const Lists& lists, const Chunk& chunk, Shared& s) {
    work_in_rows(step, lists, chunk, s);
}
FP16OPT_HD void work_on(const WithTerms<Sgd8Step>& step, const Lists& lists, const Chunk& chunk, Shared& s) {
    work_in_rows(step, lists, chunk, s);
}

FP16OPT_END
