// The steps whose state is kept in 8 bits, as programs for cuda.cuh. A block of 128 elements with one scale is the work of 16
// neighbouring threads: each steps its eight elements of a row and keeps in registers what is to be coded, the threads tell each
// other the largest of it, and each codes its own. No thread waits for others than these, and a row's memory is asked for
// while the row before it is coded.
#pragma once

#include "../functors/ratio8.h"
#include "cuda_steps.cuh"

FP16OPT_BEGIN

constexpr int kThreadsOfBlock = kStateBlock / kGroup;
static_assert(kWarp % kThreadsOfBlock == 0, "the threads of a block are of one warp");
static_assert(kRow % kStateBlock == 0 && kChunk % kStateBlock == 0 && kScaled == kStateBlock, "rows and chunks begin where blocks do");

// Memory of codes.
class CodeBytes {
public:
    FP16OPT_HD CodeBytes(const Lists& lists, int list, const Chunk& chunk)
        : first_(lists.at<uint8_t>(list, chunk)), aligned_(reinterpret_cast<uintptr_t>(first_) % kGroup == 0) {}
    FP16OPT_HD bool aligned() const { return aligned_; }
    template <bool kWhole>  // as of gradients
    FP16OPT_HD void get(int i, Eight<uint8_t>& codes, int left) const {
        load(codes, static_cast<const uint8_t*>(in_global_memory(first_) + i), kWhole || aligned_, left);
    }
    template <bool kWhole>
    FP16OPT_HD void set(int i, const Eight<uint8_t>& codes, int left) const {
        store_alone(codes, in_global_memory(first_) + i, kWhole || aligned_, left);
    }

private:
    uint8_t* first_;
    bool aligned_;
};

// Where a chunk lies: read once, and not by each thread for each row, before which its stores might have changed it, for all that
// the compiler knows. Behind the lists of a step comes that of the scales.
template <class Kind>
struct CodedMemory {
    static constexpr bool is_one = Kind::is_one;
    typedef typename MastersOf<Kind>::Made Made;
    GradsOf<Kind> grads;
    MastersOf<Kind> masters;
    ChunkMarks marks;
    CodeBytes first, second;
    float* scales;
    uint32_t dither;  // of the first element
    bool aligned;     // all of it

    FP16OPT_HD CodedMemory(const StepCommon& step, const Lists& lists, const Chunk& chunk, int second_list, int own_scales)
        : grads(lists, chunk), masters(lists, chunk, 1, step.model_list, step.number), marks(step, lists, chunk),
          first(lists, 2, chunk), second(lists, second_list, chunk),
          scales(lists.at<float>(step.model_list < 0 ? own_scales : step.model_list + 1,
                                 Chunk{chunk.block, chunk.tensor, chunk.numel, 0, 0})),
          dither(dither_at(chunk.index, step.number)),
          aligned(grads.aligned() && masters.aligned() && first.aligned() && second.aligned()) {}

    FP16OPT_HD uint32_t dither_of(int i) const { return dither + uint32_t(i) * kIndexStride; }
    FP16OPT_HD float scale_of(int i) const { return in_global_memory(scales)[i / kStateBlock]; }
    FP16OPT_HD void set_scale(int i, float scale) const {
        if (i % kStateBlock == 0) in_global_memory(scales)[i / kStateBlock] = scale;
    }
};

FP16OPT_HD float code_as_float(const Eight<uint8_t>& codes, int k) { return byte_as_float(codes.word, k); }
FP16OPT_HD uint32_t code_in_upper_byte(const Eight<uint8_t>& codes, int k) {
    return permuted(codes.word[k / 4], 0u, 0x0444u | uint32_t(k % 4) << 12);
}

// What the threads of a block share: where the chunk lies, and eight numbers of each thread, where a loop finds them one after
// the other. A thread's lie kThreads apart, so that neighbours meet no bank twice, and no other reads them.
template <class Memory>
struct CodedRows {
    float values[kGroup * kThreads];
    alignas(16) unsigned char bytes[sizeof(Memory)];  // constructors are not for shared memory

    FP16OPT_HD Memory& memory() { return *reinterpret_cast<Memory*>(bytes); }
};
class Own {
public:
    FP16OPT_HD Own(float* values, int thread) : first_(values + thread) {}
    FP16OPT_HD float get(int k) const { return first_[k * kThreads]; }
    FP16OPT_HD void set(int k, float value) const { first_[k * kThreads] = value; }
    FP16OPT_HD void set(const float (&values)[kGroup]) const {
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) set(k, values[k]);
    }

private:
    float* first_;
};

// Blocks of a step on a multiprocessor at a time: as many as have enough registers by the compilers of NVRTC 12 and 13, none of
// which is to spill. What a step waits for is arithmetic: with two in place of three an H100 took a quarter longer.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 800 || __CUDA_ARCH__ >= 1000)
constexpr int kCodedBlocks = 3;
#else
constexpr int kCodedBlocks = 4;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kAnyAdam8Blocks = 2;
#else
constexpr int kAnyAdam8Blocks = 3;
#endif

// signed_code of a ratio, and root_code of the root of a share, of numbers that are in range.
FP16OPT_HD uint32_t quick_ratio_code(float ratio, float units, uint32_t dither, float value) {
    const uint32_t wide = bit_cast<uint32_t>(ratio * units + 1.0f) + ratio_dither(dither);
    constexpr uint32_t most = ((kNoSteps + 127u) << kRatioShift) | 0x7ffffu;
    return with_sign_of((smaller_word(wide, most) >> kRatioShift) - kNoSteps, bit_cast<uint32_t>(value));
}
FP16OPT_HD uint32_t quick_root_code(float share, uint32_t dither) {
    return larger_word(smaller_word(whole_bits(share * kShares + upper_as_fraction(dither)), 0x4b0000ffu), 0x4b000001u);
}

// One step of Adam or AdamW. The state's lists: exp_avg_codes, exp_avg_sq_codes.
template <class Kind>
struct Adam8Of : StepCommon {
    const Adam8Group* groups;
    struct Terms {
        AdamTerms<float> adam;
        float unit, units;
        float up;    // step_size * 2^64: quotients of it are too large to lose bits
        bool quick;  // the numbers are such as `quick` below asks for
    };
    typedef CodedMemory<Kind> Memory;
    // Of a thread's eight elements what is read, and what is kept from the step to the coding. `quick`: the roots are such as
    // quick_root_code takes.
    struct Raw {
        Words grad, master;
        Eight<uint8_t> ratios, shares;
        float scale;
    };
    struct Kept {
        float roots[kGroup];
        Eight<uint8_t> ratios;
        float largest;
        bool quick;
    };
    typedef CodedRows<Memory> Rows;
    static constexpr bool knows_cards = true;
    static constexpr int blocks = Kind::is_one ? kCodedBlocks : kAnyAdam8Blocks;
    static constexpr float least_square = 0x1p-100f, most_root = 0x1p40f, least_moved = 0x1p-40f;

    FP16OPT_HD Memory memory(const Lists& lists, const Chunk& chunk) const { return {*this, lists, chunk, 3, 4}; }

    FP16OPT_HD Terms terms(const Lists&, const Chunk& chunk) const {
        const Member& member = members[chunk.tensor];
        const Adam8Group& g = groups[member.group];
        const AdamTerms<float> adam = terms_of<Adam>(factors(g.maximize != 0), g, count(member));
        const float units = kRatios * (1.0f / g.limit), size = magnitude_of(adam.step_size, uint32_t());
        const bool quick = adam.near && adam.root >= 0x1p-20f && adam.root <= 1.0f && adam.eps >= 0.0f && adam.eps <= 0x1p20f &&
                           size <= 0x1p60f && units <= 0x1p18f;
        return Terms{adam, g.limit * kRatioUnit, units, adam.step_size * 0x1p64f, quick};
    }

    template <bool kWhole>
    static FP16OPT_HD void get(const Memory& memory, int i, int left, Raw& raw) {
        memory.grads.template get<kWhole>(i, raw.grad, left);
        memory.masters.template get<kWhole>(i, raw.master, left);
        memory.first.template get<kWhole>(i, raw.ratios, left);
        memory.second.template get<kWhole>(i, raw.shares, left);
        raw.scale = memory.scale_of(i);
    }

    // By quotients and roots without a slow path: see quick.h. False where a number may be out of their range, which nothing was
    // written of. With d = root(v) / terms.root + eps, which is from 2^-50 to 2^61:
    // - root(v): v is from 2^-100 on; infinities and nans make a master a nan.
    // - m / d: what is divided is 2^64 times as large. A quotient that is below 2^-126 or made of a product that was, and which
    //   might be rounded in another way, is below 2^-75, and moves no master that is from 2^-40 on; nor do zeros, of either sign.
    // - |m| / root(v): what is below 2^-51 is lost in a sum with 1, and what has no remainder is infinite or a nan: the code 127.
    template <bool kL2>
    static FP16OPT_HD bool quick(const Terms& terms, const Memory& memory, int i, const Raw& raw, Eight<float>& p, Kept& kept) {
        const AdamTerms<float>& s = terms.adam;
        bool fits = true;
        const uint32_t dither = memory.dither_of(i);
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) {
            p.v[k] = memory.masters.quick_value(raw.master, p, k, fits);
            float grad = scale(unscale(memory.grads.value(raw.grad, k), s.inv_scale), s.coefficient);
            if (kL2) grad = grad + p.v[k] * s.l2;
            const float was = root_of_number(byte_as_float(raw.shares.word, k), raw.scale);
            float m = signed_of_code(code_in_upper_byte(raw.ratios, k), was, terms.unit), v = was * was;
            adam_moments_of<true>(s, grad, p.v[k], m, v);
            const float near = near_inverse_root(v), now = quick_root(v, near);
            const float by = quick_quotient(now, s.root, s.inverse) + s.eps;
            const float move = quick_quotient(terms.up * m, by, quick_inverse(by, near_inverse(by)));
            p.v[k] = fused(move, 0x1p-64f, p.v[k]);
            fits &= v >= least_square;
            fits &= magnitude_of(p.v[k], uint32_t()) >= least_moved;
            const float ratio = quick_quotient(magnitude_of(m, uint32_t()), now, quick_inverse(now, near));
            put_byte(kept.ratios.word, k, quick_ratio_code(ratio, terms.units, dither + uint32_t(k) * kIndexStride, m));
            kept.roots[k] = now;
            kept.largest = larger_of(now, kept.largest);
        }
        return fits & (kept.largest <= most_root);
    }

    // By the operations of the specification, element after element. Roots are left in `own`.
    template <bool kWhole>
    static FP16OPT_HD void step(const Terms& terms, const Memory& memory, int i, int left, Eight<float>& p, Kept& kept, const Own& own) {
        Raw raw;
        Eight<float> g;
        get<kWhole>(memory, i, left, raw);
        memory.grads.widen_to(raw.grad, g);
        own.set(g.v);
        memory.masters.values(raw.master, p);
        kept.quick = false;
        kept.largest = 0.0f;
        FP16OPT_ROLLED
        for (int k = 0; k < kGroup; ++k) {
            const float was = root_of_code(uint32_t(taken(raw.shares.word)), raw.scale);
            float m = signed_of_code(uint32_t(taken(raw.ratios.word)) << 24, was, terms.unit), v = was * was, moved = taken(p.v);
            adam_moments(terms.adam, own.get(k), moved, m, v);
            const float second_root = root(v), now = k < left ? root_to_keep(second_root) : 0.0f;
            adam_move(terms.adam, moved, m, second_root);
            m = moment_to_keep(m);
            const float ratio = ratio_or_zero(magnitude_of(m, uint32_t()), now);
            put_behind(p.v, moved);
            put_behind(raw.ratios.word, signed_code(ratio_steps(ratio, terms.units, ratio_dither(memory.dither_of(i + k))), m));
            put_behind(raw.shares.word, 0u);
            own.set(k, now);
            kept.largest = larger_of(now, kept.largest);
        }
        kept.ratios = raw.ratios;
    }

    // `p` has the values of masters where the kernel does not know their kind.
    static FP16OPT_HD bool try_quick(const Terms& terms, const Memory& memory, int i, const Raw& raw, Eight<float>& p, Kept& kept) {
        return terms.adam.adds_l2 ? quick<true>(terms, memory, i, raw, p, kept) : quick<false>(terms, memory, i, raw, p, kept);
    }

    template <bool kWhole>
    static FP16OPT_HD void keep(const Memory& memory, int i, int left, Kept& kept, const Own& own, float largest) {
        const bool zero = !(largest >= kLeastScale);
        const uint32_t dither = memory.dither_of(i);
        Eight<uint8_t> codes;
        codes.clear();
        if (kWhole && kept.quick && largest <= most_root && !zero) {  // no root is zero
            const float per_scale = quick_inverse(largest, near_inverse(largest));
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) {
                const float share = kept.roots[k] * per_scale;
                put_byte(codes.word, k, quick_root_code(quick_root(share, near_inverse_root(share)), dither + uint32_t(k) * kIndexStride));
            }
        } else if (zero) {
            kept.ratios.clear();
        } else {
            const float per_scale = 1.0f / largest;
            if (kWhole && kept.quick) own.set(kept.roots);
            FP16OPT_ROLLED
            for (int k = 0; k < kGroup; ++k) {
                const float shares = root_shares(root(own.get(k) * per_scale), dither + uint32_t(k) * kIndexStride);
                put_behind(codes.word, root_code(to_words(shares), own.get(k)));
            }
        }
        memory.first.template set<kWhole>(i, kept.ratios, left);
        memory.second.template set<kWhole>(i, codes, left);
        memory.set_scale(i, zero ? 0.0f : largest);
    }
};

// One step of SGD. The state's list: momentum_codes; lists.add tells where they hold nothing yet.
template <class Kind>
struct Sgd8Of : StepCommon {
    const SgdGroup* groups;
    struct Terms {
        SgdTerms<float> sgd;
        bool first;
        static constexpr bool quick = true;
    };
    typedef CodedMemory<Kind> Memory;
    struct Raw {
        Words grad, master;
        Eight<uint8_t> codes;
        float scale;
    };
    struct Kept {
        float momenta[kGroup];
        float largest;
        bool quick;
    };
    typedef CodedRows<Memory> Rows;
    static constexpr bool knows_cards = true;
    static constexpr int blocks = Kind::is_one ? kCodedBlocks : 3;

    FP16OPT_HD Memory memory(const Lists& lists, const Chunk& chunk) const { return {*this, lists, chunk, 2, 3}; }

    FP16OPT_HD Terms terms(const Lists& lists, const Chunk& chunk) const {
        const SgdGroup& g = groups[members[chunk.tensor].group];
        const bool first = lists.add[chunk.tensor] != 0;
        return Terms{terms_of<Sgd>(factors(g.maximize != 0), g, 0.0f), first};
    }

    template <bool kWhole>
    static FP16OPT_HD void get(const Memory& memory, int i, int left, Raw& raw) {
        memory.grads.template get<kWhole>(i, raw.grad, left);
        memory.masters.template get<kWhole>(i, raw.master, left);
        memory.first.template get<kWhole>(i, raw.codes, left);
        raw.scale = memory.scale_of(i);
    }

    // The steps of `momentum`, which becomes what is kept, and of a master.
    static FP16OPT_HD void move(const Terms& terms, float grad, uint32_t code, float scale, float& p, float& momentum) {
        if (terms.first) {
            sgd<true>(terms.sgd, grad, p, &momentum);
        } else {
            momentum = signed_of_code(code, scale, kRatioUnit);
            sgd<false>(terms.sgd, grad, p, &momentum);
        }
        momentum = moment_to_keep(momentum);
    }

    // By the operations of the specification, element after element. Momenta are left in `own`.
    template <bool kWhole>
    static FP16OPT_HD void step(const Terms& terms, const Memory& memory, int i, int left, Eight<float>& p, Kept& kept, const Own& own) {
        Raw raw;
        Eight<float> g;
        get<kWhole>(memory, i, left, raw);
        memory.grads.widen_to(raw.grad, g);
        own.set(g.v);
        memory.masters.values(raw.master, p);
        kept.quick = false;
        kept.largest = 0.0f;
        FP16OPT_ROLLED
        for (int k = 0; k < kGroup; ++k) {
            float momentum = 0.0f, moved = taken(p.v);
            move(terms, own.get(k), uint32_t(taken(raw.codes.word)) << 24, raw.scale, moved, momentum);
            put_behind(p.v, moved);
            put_behind(raw.codes.word, 0u);
            own.set(k, momentum);
            kept.largest = larger_of(kept.largest, k < left ? magnitude_of(momentum, uint32_t()) : 0.0f);
        }
    }

    // As Adam8Of's; there is no quotient.
    static FP16OPT_HD bool try_quick(const Terms& terms, const Memory& memory, int, const Raw& raw, Eight<float>& p, Kept& kept) {
        const SgdTerms<float>& s = terms.sgd;
        Eight<float> g;
        bool fits = true;
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) {
            p.v[k] = memory.masters.quick_value(raw.master, p, k, fits);
            g.v[k] = scale(unscale(memory.grads.value(raw.grad, k), s.inv_scale), s.coefficient);
        }
        if (s.adds_l2) {
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) g.v[k] = g.v[k] + p.v[k] * s.l2;
        }
        if (terms.first) {
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) sgd_of<true>(s, g.v[k], p.v[k], &kept.momenta[k]);
        } else {
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) {
                kept.momenta[k] = signed_of_code(code_in_upper_byte(raw.codes, k), raw.scale, kRatioUnit);
                sgd_of<false>(s, g.v[k], p.v[k], &kept.momenta[k]);
            }
        }
        FP16OPT_UNROLL
        for (int k = 0; k < kGroup; ++k) {
            kept.momenta[k] = moment_to_keep(kept.momenta[k]);
            kept.largest = larger_of(kept.largest, magnitude_of(kept.momenta[k], uint32_t()));
        }
        return fits;
    }

    template <bool kWhole>
    static FP16OPT_HD void keep(const Memory& memory, int i, int left, Kept& kept, const Own& own, float of_block) {
        const float largest = smaller(of_block, kLargestMomentum);
        const bool zero = !(largest >= kLeastMomentum);
        const uint32_t dither = memory.dither_of(i);
        Eight<uint8_t> codes;
        codes.clear();
        // Of what has no remainder the share is lost in a sum with 1.
        if (kWhole && kept.quick && largest >= 0x1p-60f && largest <= 0x1p60f) {
            const float inverse = quick_inverse(largest, near_inverse(largest));
            FP16OPT_UNROLL
            for (int k = 0; k < kGroup; ++k) {
                const float share = quick_quotient(magnitude_of(kept.momenta[k], uint32_t()), largest, inverse);
                put_byte(codes.word, k, quick_ratio_code(share, kRatios, dither + uint32_t(k) * kIndexStride, kept.momenta[k]));
            }
        } else if (!zero) {
            if (kWhole && kept.quick) own.set(kept.momenta);
            FP16OPT_ROLLED
            for (int k = 0; k < kGroup; ++k) {
                const float share = ratio_or_zero(magnitude_of(own.get(k), uint32_t()), largest);
                const uint32_t low = ratio_dither(dither + uint32_t(k) * kIndexStride);
                put_behind(codes.word, signed_code(ratio_steps(share, kRatios, low), own.get(k)));
            }
        }
        memory.first.template set<kWhole>(i, codes, left);
        memory.set_scale(i, zero ? 0.0f : largest);
    }
};

// The largest of what a thread and those that work on the same block found. All threads of a warp come here together.
#if defined(__CUDA_ARCH__)
FP16OPT_HD float largest_of_block(float largest) {
    FP16OPT_UNROLL
    for (int apart = kThreadsOfBlock / 2; apart > 0; apart /= 2) {
        largest = larger_of(largest, __shfl_xor_sync(0xffffffffu, largest, apart));
    }
    return largest;
}
#endif

// Row after row: see above. A warp's rows of whole groups come first, where all memory is aligned.
template <class Step>
FP16OPT_HD void work_in_rows(const WithTerms<Step>& o, const Lists& lists, const Chunk& chunk, Shared& s) {
    typename Step::Memory& memory = o.rows.memory();
    for_threads([&](int t) {
        if (t == 0) memory = o.step.memory(lists, chunk);
        put_thread<Step::finds>(s, t, Found{0.0, 0, 0});
    });
    const auto is_whole = [&](int t, int i) {  // the row of a warp's thread that begins at i
        return memory.aligned && o.terms.quick && i + (kWarp - t % kWarp) * kGroup <= chunk.numel;
    };
    const auto advance = [&](int t, int i, const typename Step::Raw& raw, typename Step::Kept& kept) {
        constexpr bool is_one = Step::Memory::is_one;
        Eight<float> p;
        typename Step::Memory::Made made;
        Found found{0.0, 0, 0};
        kept.largest = 0.0f;
        if (!is_one) memory.masters.values(raw.master, p);
        kept.quick = Step::try_quick(o.terms, memory, i, raw, p, kept);
        kept.quick &= memory.masters.quick_make(i, p, made);
        if (is_one && kept.quick) {
            memory.masters.quick_set(i, p, made, memory.marks, found);  // finite weights
            if (!kMarks) return;
        } else {
            if (!kept.quick) Step::template step<true>(o.terms, memory, i, kGroup, p, kept, Own(o.rows.values, t));
            memory.masters.template set<false, true>(i, p, kGroup, memory.marks, found);
        }
        add_thread<Step::finds>(s, t, found);
    };
    const auto advance_any = [&](int t, int i, typename Step::Kept& kept) {
        const int left = chunk.numel - i;
        Eight<float> p;
        Found found{0.0, 0, 0};
        kept.largest = 0.0f;
        if (left <= 0) return;
        Step::template step<false>(o.terms, memory, i, left, p, kept, Own(o.rows.values, t));
        memory.masters.set(i, p, left, memory.marks, found);
        add_thread<Step::finds>(s, t, found);
    };
    const auto keep_any = [&](int t, int i, typename Step::Kept& kept, float largest) {
        const int left = chunk.numel - i;
        if (left > 0) Step::template keep<false>(memory, i, left, kept, Own(o.rows.values, t), largest);
    };
#if defined(__CUDA_ARCH__)
    // What a thread can find again is not kept in registers: its number is that of its place in the row.
    const auto thread_at = [](int i) { return i / kGroup % kThreads; };
    int i = int(threadIdx.x) * kGroup;
    const int last = is_whole(int(threadIdx.x), i) ? chunk.numel - (kWarp - int(threadIdx.x) % kWarp) * kGroup : -1;
    typename Step::Raw raw;
    if (i <= last) Step::template get<true>(memory, i, kGroup, raw);
    FP16OPT_ROLLED
    while (i <= last) {
        typename Step::Kept kept;
        advance(thread_at(i), i, raw, kept);
        // Of the last row once more: where it depended on a branch what was read before would be kept in registers.
        const int next = i + kRow;
        Step::template get<true>(memory, next <= last ? next : i, kGroup, raw);
        Step::template keep<true>(memory, i, kGroup, kept, Own(o.rows.values, thread_at(i)), largest_of_block(kept.largest));
        i = next;
    }
    FP16OPT_ROLLED
    for (; i - thread_at(i) % kWarp * kGroup < chunk.numel; i += kRow) {
        typename Step::Kept kept;
        advance_any(thread_at(i), i, kept);
        keep_any(thread_at(i), i, kept, largest_of_block(kept.largest));
    }
    __syncthreads();
#else
    typename Step::Kept kept[kThreads];
    for (int row = 0; row < chunk.numel; row += kRow) {
        for_threads([&](int t) {
            const int i = row + t * kGroup;
            if (!is_whole(t, i)) return advance_any(t, i, kept[t]);
            typename Step::Raw raw;
            Step::template get<true>(memory, i, kGroup, raw);
            advance(t, i, raw, kept[t]);
        });
        for_threads([&](int t) {
            const int i = row + t * kGroup, first = t - t % kThreadsOfBlock;
            float largest = 0.0f;
            for (int k = 0; k < kThreadsOfBlock; ++k) largest = larger_of(largest, kept[first + k].largest);
            if (!is_whole(t, i)) return keep_any(t, i, kept[t], largest);
            Step::template keep<true>(memory, i, kGroup, kept[t], Own(o.rows.values, t), largest);
        });
    }
#endif
}
template <class Kind>
FP16OPT_HD void work_on(const WithTerms<Adam8Of<Kind>>& step, const Lists& lists, const Chunk& chunk, Shared& s) {
    work_in_rows(step, lists, chunk, s);
}
template <class Kind>
FP16OPT_HD void work_on(const WithTerms<Sgd8Of<Kind>>& step, const Lists& lists, const Chunk& chunk, Shared& s) {
    work_in_rows(step, lists, chunk, s);
}

FP16OPT_END
