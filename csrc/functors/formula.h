// What a formula of a one-pass step is. It is a struct derived from `Formula`, alone in a file of this folder, by which the
// build finds it (flatten.py); loops, programs and entries for CPU and CUDA are made of it. It has:
//
//   Group               what a param_group says: `Number lr` first, `int32_t maximize` somewhere; fields of one row in
//                       fp16opt/kernels/formulas.py, in its order
//   Scalars             what one tensor's step works with: float and int32_t
//   Terms<T>            the same as T, which is float or a vector of floats: made of (GradFactors, Scalars, splat)
//   scalars(group, lr, count)           in double, each rounded to float once; `count`: of steps, with this one, from 1
//   step<kPhase, kFirst>(terms, g, p, state...)   one element: `g` is the gradient as it is stored, widened, and holds
//                       what it likes from phase to phase; `p` and the state are updated
//
// Only + - * / , the functions of elementary.h and comparisons: so all backends give the same bits.
#pragma once

#include "options.h"
#include "../core/macros.h"

FP16OPT_BEGIN

struct Formula {
    static constexpr int least_states = 1, most_states = 1;  // tensors of state, of the parameter's shape; 3 at most
    static constexpr bool counts = false;       // `scalars` asks for the number of the step
    static constexpr bool fills_first = false;  // state is not read in a tensor's first step: kFirst
    static constexpr int phases = 1;  // 2: a vector unit does the first for a whole block of elements, then the second
};

// One phase for the k-th of several elements; `states` are as many as kStates, and like g and p have `v[k]`.
template <class F, int kStates, int kPhase, bool kFirst, class Terms, class Values>
FP16OPT_HD void step_one(const Terms& terms, Values& g, Values& p, Values* states, int k) {
    if constexpr (kStates == 0) {
        (void)states;
        F::template step<kPhase, kFirst>(terms, g.v[k], p.v[k]);
    } else if constexpr (kStates == 1) {
        F::template step<kPhase, kFirst>(terms, g.v[k], p.v[k], states[0].v[k]);
    } else if constexpr (kStates == 2) {
        F::template step<kPhase, kFirst>(terms, g.v[k], p.v[k], states[0].v[k], states[1].v[k]);
    } else {
        static_assert(kStates == 3, "a step has room for three tensors of state");
        F::template step<kPhase, kFirst>(terms, g.v[k], p.v[k], states[0].v[k], states[1].v[k], states[2].v[k]);
    }
}

FP16OPT_END
