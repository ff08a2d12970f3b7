// How steps are launched, and what their tables must be. As in cuda_launch.cuh a host compiler makes loops of it.
#pragma once

#include "../cuda_api_steps.h"
#include "cuda_launch.cuh"
#include "cuda_steps.cuh"

namespace fp16opt {

#if defined(__CUDACC__)

template <class Step>
constexpr int blocks_of() {
    return Step::blocks < FP16OPT_BLOCKS ? Step::blocks : FP16OPT_BLOCKS;
}

template <class Step>
__global__ void __launch_bounds__(kThreads, blocks_of<Step>()) stepping_kernel(const Step step, const Lists lists) {
    __shared__ Shared shared;
    __shared__ TermsRoom<Step> room;
    run_stepping(step, lists, int64_t(blockIdx.x), shared, room);
}

#endif

template <class Step>
void launch_stepping(const char* name, const Launch& launch, const Step& step) {
    const Lists view = lists_of(launch.table, launch.memory);
    const int64_t blocks = view.chunk_count > 0 ? view.chunk_count : 1;  // empty tensors count steps too
#if defined(__CUDACC__)
    launch_blocks(stepping_kernel<Step>, name, launch, step, view, blocks);
#else
    (void)name;
    Shared shared;
    TermsRoom<Step> room;
    const Order order(blocks);
    for (int64_t i = 0; i < blocks; ++i) run_stepping(step, view, order.at(i), shared, room);
#endif
}

// Throws std::invalid_argument for a table that was made for something else. `state`: how many lists it has.
inline StepCommon common_of(const Launch& launch, const CudaStep& step, int state) {
    const CudaTable& table = launch.table;
    const int lists = 2 + state + int(step.has_models);
    table.require(lists, step.n);
    for (int list = 2; list < 2 + state; ++list) table.require_dtypes(list, {DType::single});
    if (step.has_models) {
        table.require_dtypes(0, {DType::half, DType::bfloat16, DType::single});
        table.require_dtypes(1, {DType::half, DType::single});  // remainders are of 16 bits
        table.require_dtypes(lists - 1, {DType::half, DType::bfloat16});
    } else {
        table.require_dtypes(0, {DType::single});
        table.require_dtypes(1, {DType::single});
    }
    const Entry* entries = lists_of(table, launch.memory).table;
    return {step.inv_scale, step.coefficient, step.found_inf,
            step.members,   entries,          step.overflow,  step.has_models ? lists - 1 : -1};
}

}  // namespace fp16opt
