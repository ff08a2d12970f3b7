// The one-pass steps as programs for cuda.cuh: eight elements of a thread go from gradient, master and state to master,
// state and 16-bit weight without leaving its registers.
#pragma once

#include "../functors/adam.h"
#include "../functors/lion.h"
#include "../functors/power.h"
#include "../functors/scalars.h"
#include "../functors/sgd.h"
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
struct StepCommon {
    const float *inv_scale, *coefficient;
    const float* found_inf;  // null: the step is decided
    const Member* members;   // by entry
    const Entry* table;
    int32_t* overflow;
    int32_t model_list;  // -1: parameters that are their own masters
    uint32_t number;     // of the step, by which what has few bits is rounded
    static constexpr int finds = kFlags;
    struct Rows {};  // what the threads of a block share beyond it

    FP16OPT_HD bool is_needed() const { return found_inf == nullptr || *found_inf == 0.0f; }
    FP16OPT_HD GradFactors factors(bool maximize) const { return {*inv_scale, maximize ? -*coefficient : *coefficient}; }

    // How many steps the tensor will have taken. A counter is written behind the last block that reads it.
    FP16OPT_HD float count(const Member& member) const {
        return member.step == nullptr ? member.number : *in_global_memory(member.step) + 1.0f;
    }

    FP16OPT_HD void report(const Entry& entry, const Found& found) const {
        const Member& member = members[&entry - table];
        if (member.step != nullptr) *in_global_memory(member.step) += 1.0f;
        if (model_list >= 0) overflow[entry.row] = int32_t(found.flags);
    }
    FP16OPT_HD void finish(Shared&) const {}
};

// The numbers of a step of Adam or AdamW for one tensor.
template <class Group>
FP16OPT_HD AdamTerms<float> adam_terms(const GradFactors& factors, const Group& g, float count) {
    const double t = double(count);
    const double root2 = square_root(1.0 - power(g.beta2, t));
    const AdamScalars scalars = adam_scalars(number_of(g.lr), g.beta1, g.beta2, g.eps, g.weight_decay, g.decoupled != 0,
                                             power(g.beta1, t), root2);
    return AdamTerms<float>(factors, scalars, SplatFloat{});
}
FP16OPT_HD SgdTerms<float> sgd_terms(const GradFactors& factors, const SgdGroup& g, bool first) {
    const SgdScalars scalars = sgd_scalars(number_of(g.lr), g.momentum, g.dampening, g.weight_decay, g.nesterov != 0, first);
    return SgdTerms<float>(factors, scalars, SplatFloat{});
}

// One step of Adam or AdamW. The state's lists: exp_avg, exp_avg_sq and, for amsgrad, max_exp_avg_sq.
template <bool kAmsgrad>
struct AdamStepOf : StepCommon {
    const AdamGroup* groups;
    using Terms = AdamTerms<float>;
    static constexpr int blocks = 2;  // on a multiprocessor at a time: five arrays of eight elements need the registers

    FP16OPT_HD Terms terms(const Lists&, const Chunk& chunk) const {
        const Member& member = members[chunk.tensor];
        const AdamGroup& g = groups[member.group];
        return adam_terms(factors(g.maximize != 0), g, count(member));
    }

    FP16OPT_HD Found work(const Terms& terms, const Lists& lists, const Chunk& chunk, int thread) const {
        const Grads grads(lists, chunk);
        const Masters masters(lists, chunk, 1, model_list, number);
        const Singles exp_avg(lists, 2, chunk), exp_avg_sq(lists, 3, chunk), largest(lists, kAmsgrad ? 4 : 3, chunk);
        Found found{0.0, 0, 0};
        for_each_group(chunk.numel, thread, [&](int i, int valid) {
            Words raw_grad, raw_master;
            Eight<float> g, p, m, v, top;
            grads.get(i, raw_grad, valid);
            masters.get(i, raw_master, valid);
            exp_avg.get(i, m, valid);
            exp_avg_sq.get(i, v, valid);
            if constexpr (kAmsgrad) largest.get(i, top, valid);
            grads.widen_to(raw_grad, g);
            masters.values(raw_master, p);
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) {
                adam(terms, g.v[k], p.v[k], m.v[k], v.v[k], kAmsgrad ? &top.v[k] : nullptr);
            }
            exp_avg.set(i, m, valid);
            exp_avg_sq.set(i, v, valid);
            if constexpr (kAmsgrad) largest.set(i, top, valid);
            masters.set(i, p, valid, found);
        });
        return found;
    }
};
using AdamStep = AdamStepOf<false>;
using AmsgradStep = AdamStepOf<true>;

// One step of SGD. The state's list with momentum: momentum_buffer; lists.add tells where it holds nothing yet.
template <bool kMomentum>
struct SgdStepOf : StepCommon {
    const SgdGroup* groups;
    using Terms = SgdTerms<float>;
    static constexpr int blocks = 3;

    FP16OPT_HD Terms terms(const Lists& lists, const Chunk& chunk) const {
        const SgdGroup& g = groups[members[chunk.tensor].group];
        return sgd_terms(factors(g.maximize != 0), g, lists.add[chunk.tensor] != 0);
    }

    enum Buffer { kNone, kEmpty, kFilled };

    template <Buffer kBuffer>
    FP16OPT_HD Found work_as(const Terms& terms, const Lists& lists, const Chunk& chunk, int thread) const {
        const Grads grads(lists, chunk);
        const Masters masters(lists, chunk, 1, model_list, number);
        const Singles buffers(lists, kBuffer == kNone ? 1 : 2, chunk);
        Found found{0.0, 0, 0};
        for_each_group(chunk.numel, thread, [&](int i, int valid) {
            Words raw_grad, raw_master;
            Eight<float> g, p, b;
            grads.get(i, raw_grad, valid);
            masters.get(i, raw_master, valid);
            if constexpr (kBuffer == kFilled) buffers.get(i, b, valid);
            grads.widen_to(raw_grad, g);
            masters.values(raw_master, p);
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) {
                sgd<kBuffer == kEmpty>(terms, g.v[k], p.v[k], kBuffer == kNone ? nullptr : &b.v[k]);
            }
            if constexpr (kBuffer != kNone) buffers.set(i, b, valid);
            masters.set(i, p, valid, found);
        });
        return found;
    }

    FP16OPT_HD Found work(const Terms& terms, const Lists& lists, const Chunk& chunk, int thread) const {
        if constexpr (!kMomentum) {
            return work_as<kNone>(terms, lists, chunk, thread);
        } else {
            return lists.add[chunk.tensor] != 0 ? work_as<kEmpty>(terms, lists, chunk, thread)
                                                : work_as<kFilled>(terms, lists, chunk, thread);
        }
    }
};
using SgdStep = SgdStepOf<false>;
using MomentumStep = SgdStepOf<true>;

// One step of Lion. The state's list: exp_avg.
struct LionStep : StepCommon {
    const LionGroup* groups;
    using Terms = LionTerms<float>;
    static constexpr int blocks = 3;

    FP16OPT_HD Terms terms(const Lists&, const Chunk& chunk) const {
        const LionGroup& g = groups[members[chunk.tensor].group];
        return Terms(factors(g.maximize != 0), lion_scalars(number_of(g.lr), g.beta1, g.beta2, g.weight_decay),
                     SplatFloat{});
    }

    FP16OPT_HD Found work(const Terms& terms, const Lists& lists, const Chunk& chunk, int thread) const {
        const Grads grads(lists, chunk);
        const Masters masters(lists, chunk, 1, model_list, number);
        const Singles exp_avg(lists, 2, chunk);
        Found found{0.0, 0, 0};
        for_each_group(chunk.numel, thread, [&](int i, int valid) {
            Words raw_grad, raw_master;
            Eight<float> g, p, m;
            grads.get(i, raw_grad, valid);
            masters.get(i, raw_master, valid);
            exp_avg.get(i, m, valid);
            grads.widen_to(raw_grad, g);
            masters.values(raw_master, p);
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) lion(terms, g.v[k], p.v[k], m.v[k]);
            exp_avg.set(i, m, valid);
            masters.set(i, p, valid, found);
        });
        return found;
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
struct alignas(8) StepRoom {
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
