// The one-pass steps as programs for cuda.cuh: eight elements of a thread go from gradient, master and state to master,
// state and 16-bit weight without leaving its registers.
#pragma once

#include "formulas.h"
#include "cuda_masters.cuh"
#include "cuda_numbers.h"

FP16OPT_BEGIN

FP16OPT_HD double number_of(const Number& n) {
    if (n.at == nullptr) return n.value;
    const void* at = in_global_memory(n.at);
    return n.is_wide != 0 ? *static_cast<const double*>(at) : double(*static_cast<const float*>(at));
}

struct SplatFloat {
    FP16OPT_HD float operator()(float x) const { return x; }
};

// What all steps have. Lists: grads, masters, those of the state, and models, where there are any.
struct StepCommon : Marking {
    const float *inv_scale, *coefficient;
    const float* found_inf;  // null: the step is decided
    const Member* members;   // by entry
    const Entry* table;
    int32_t* overflow;
    int32_t model_list;  // -1: parameters that are their own masters
    uint32_t number;     // of the step, by which what has few bits is rounded
    struct Rows {};  // what the threads of a block share beyond it
    static constexpr bool knows_cards = false;  // whether `blocks` is right for each card, and not only where three of others fit

    FP16OPT_HD bool is_needed() const { return found_inf == nullptr || *found_inf == 0.0f; }
    FP16OPT_HD GradFactors factors(bool maximize) const { return {*inv_scale, maximize ? -*coefficient : *coefficient}; }

    // How many steps the tensor will have taken. A counter is written behind the last block that reads it.
    FP16OPT_HD float count(const Member& member) const {
        return member.step == nullptr ? member.number : *in_global_memory(member.step) + 1.0f;
    }

    FP16OPT_HD void report(const Entry& entry, const Found& found) const {
        const Member& member = members[&entry - table];
        if (member.step != nullptr) *in_global_memory(member.step) += 1.0f;
        if (model_list >= 0) {
            overflow[entry.row] = int32_t(found.flags);
            add_guard(entry, found);
        }
    }
    FP16OPT_HD void finish(Shared&) const {}
};

// The numbers of a step for one tensor. `count` is looked at by formulas that count.
template <class F, class Group>
FP16OPT_HD typename F::template Terms<float> terms_of(const GradFactors& factors, const Group& group, float count) {
    return typename F::template Terms<float>(factors, F::scalars(group, number_of(group.lr), double(count)), SplatFloat{});
}

// One step of a formula with kStates lists of state; lists.add tells where they hold nothing yet, if the formula asks.
template <class F, int kStates>
struct StepOf : StepCommon {
    const typename F::Group* groups;
    using Terms = typename F::template Terms<float>;
    // On a multiprocessor at a time: eight elements of each list, and marks, need registers.
    static constexpr int blocks = kStates + int(kMarks) > 1 ? 2 : 3;

    FP16OPT_HD Terms terms(const Lists&, const Chunk& chunk) const {
        const Member& member = members[chunk.tensor];
        const typename F::Group& g = groups[member.group];
        return terms_of<F>(factors(g.maximize != 0), g, F::counts ? count(member) : 0.0f);
    }

    template <bool kFirst>
    FP16OPT_HD Found work_as(const Terms& terms, const Lists& lists, const Chunk& chunk, int thread) const {
        const Grads grads(lists, chunk);
        const Masters masters(lists, chunk, 1, model_list, number);
        const ChunkMarks marks(*this, lists, chunk);
        // More than there are would be fields that no kernel reads: the last one again.
        const Singles state[] = {{lists, kStates > 0 ? 2 : 1, chunk}, {lists, kStates > 1 ? 3 : 1, chunk}, {lists, kStates > 2 ? 4 : 1, chunk}};
        Found found{0.0, 0, 0};
        for_each_group(chunk.numel, thread, [&](int i, int left) {
            Words raw_grad, raw_master;
            Eight<float> g, p, kept[kStates > 0 ? kStates : 1];
            grads.get(i, raw_grad, left);
            masters.get(i, raw_master, left);
            FP16OPT_UNROLL
            for (int j = 0; j < kStates; ++j) {
                if constexpr (!kFirst) state[j].get(i, kept[j], left);
            }
            grads.widen_to(raw_grad, g);
            masters.values(raw_master, p);
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) {
                step_one<F, kStates, 0, kFirst>(terms, g, p, kept, k);
                if constexpr (F::phases > 1) step_one<F, kStates, 1, kFirst>(terms, g, p, kept, k);
            }
            FP16OPT_UNROLL
            for (int j = 0; j < kStates; ++j) state[j].template set<(kStates > 1)>(i, kept[j], left);
            masters.set(i, p, left, marks, found);
        });
        return found;
    }

    FP16OPT_HD Found work(const Terms& terms, const Lists& lists, const Chunk& chunk, int thread) const {
        if constexpr (F::fills_first && kStates > 0) {
            if (lists.add[chunk.tensor] != 0) return work_as<true>(terms, lists, chunk, thread);
        }
        return work_as<false>(terms, lists, chunk, thread);
    }
};

// A step as run_finding wants it, with the numbers that its block has worked out, and the block's memory.
template <class Step>
struct WithTerms {
    const Step& step;
    const typename Step::Terms& terms;
    typename Step::Rows& rows;
    static constexpr int finds = Step::finds;

    FP16OPT_HD Found work(const Lists& lists, const Chunk& chunk, int thread) const {
        return step.work(terms, lists, chunk, thread);
    }
    FP16OPT_HD void report(const Entry& entry, const Found& found) const { step.report(entry, found); }
    FP16OPT_HD void finish(Shared& s) const { step.finish(s); }
};

// Memory of a block for the numbers of its step; the constructor of these is not for shared memory.
template <class Step>
struct alignas(16) StepRoom {
    unsigned char bytes[sizeof(typename Step::Terms)];
    typename Step::Rows rows;

    FP16OPT_HD typename Step::Terms* at() { return reinterpret_cast<typename Step::Terms*>(bytes); }
};

// A block's part of a step: nothing at all where found_inf says so, or one chunk.
template <class Step>
FP16OPT_HD void run_stepping(const Step& step, const Lists& lists, int64_t block, Shared& s, StepRoom<Step>& room) {
    if (!step.is_needed()) return;
    for_threads([&](int t) {
        if (t == 0 && block < lists.chunk_count) *room.at() = step.terms(lists, lists.chunks[block]);
    });
    run_finding(WithTerms<Step>{step, *room.at(), room.rows}, lists, block, s);
}

FP16OPT_END
