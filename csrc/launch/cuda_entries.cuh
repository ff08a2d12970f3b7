// The kernels' entries, and the root of the one source that they are compiled from at run time: NVRTC makes kernels of it,
// a host compiler makes functions that run the blocks one after the other. Which operations there are, and what their
// structs look like, is in fp16opt/kernels/cuda_rows.py, which writes the lines below this file's.
#if defined(__CUDACC_RTC__)  // there are no system headers
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;
#define INT32_MAX 0x7fffffff
#define offsetof(type, field) (__INTADDR__(&((type*)0)->field))
#else
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>
#endif

#include "cuda.cuh"
#include "cuda_decisions.cuh"
#include "cuda_measures.cuh"
#include "cuda_operations.cuh"
#include "cuda_split.cuh"
#include "cuda_state8.cuh"

// Structs that inherit have their fields one behind the other as well: each is asserted where it is laid out.
#if defined(__CUDACC_RTC__)
#pragma nv_diag_suppress 1427
#elif defined(__GNUC__)
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
#endif
#define FP16OPT_SIZE(type, size) static_assert(sizeof(fp16opt::type) == size, #type " has another size on the host")
#define FP16OPT_FIELD(type, field, offset) \
    static_assert(offsetof(fp16opt::type, field) == offset, #type "." #field " is elsewhere on the host")

#if defined(__CUDACC__)

// As many blocks at a time on a multiprocessor as registers allow without spilling.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define FP16OPT_BLOCKS 2
#else
#define FP16OPT_BLOCKS 3
#endif
#define FP16OPT_STEP_BLOCKS(Step) (Step::knows_cards || Step::blocks < FP16OPT_BLOCKS ? Step::blocks : FP16OPT_BLOCKS)
#define FP16OPT_ENTRY(name, ...) extern "C" __global__ void __launch_bounds__(__VA_ARGS__) fp16opt_##name

#define FP16OPT_FINDING(name, Operation)                                                                        \
    FP16OPT_ENTRY(name, fp16opt::kThreads, FP16OPT_BLOCKS)                                                       \
    (const fp16opt::Operation operation, const fp16opt::Lists lists) {                                           \
        __shared__ fp16opt::Shared shared;                                                                       \
        fp16opt::run_finding(operation, lists, int64_t(blockIdx.x), shared);                                     \
    }
#define FP16OPT_MEASURING(name, Operation)                                                                       \
    FP16OPT_ENTRY(name, fp16opt::kThreads, FP16OPT_BLOCKS)                                                       \
    (const fp16opt::Operation operation, const fp16opt::Lists lists) {                                           \
        __shared__ fp16opt::NumbersRoom room;                                                                    \
        fp16opt::run_measuring(operation, lists, int64_t(blockIdx.x), room);                                     \
    }
#define FP16OPT_MAPPING(name, Operation)                                                                         \
    FP16OPT_ENTRY(name, fp16opt::kThreads, FP16OPT_BLOCKS)                                                       \
    (const fp16opt::Operation operation, const fp16opt::Lists lists) {                                           \
        fp16opt::run_mapping(operation, lists, int64_t(blockIdx.x), int64_t(gridDim.x));                         \
    }
#define FP16OPT_STEPPING(name, Step)                                                                             \
    FP16OPT_ENTRY(name, fp16opt::kThreads, FP16OPT_STEP_BLOCKS(fp16opt::Step))                                   \
    (const fp16opt::Step step, const fp16opt::Lists lists) {                                                     \
        __shared__ fp16opt::Shared shared;                                                                       \
        __shared__ fp16opt::StepRoom<fp16opt::Step> room;                                                        \
        fp16opt::run_stepping(step, lists, int64_t(blockIdx.x), shared, room);                                   \
    }
#define FP16OPT_SINGLE(name, Operation)                                                                          \
    FP16OPT_ENTRY(name, fp16opt::kThreads)(const fp16opt::Operation operation) { operation.run(); }

#else

namespace fp16opt {

template <class Block>
void for_blocks(int64_t blocks, Block&& block) {
    const Order order(blocks);
    for (int64_t i = 0; i < blocks; ++i) block(order.at(i));
}

template <class T>
const T& argument(void** arguments, int which) {
    return *static_cast<const T*>(arguments[which]);
}

}  // namespace fp16opt

// `arguments` are as cuLaunchKernel takes them.
#define FP16OPT_ENTRY(name) \
    extern "C" __attribute__((visibility("default"))) void fp16opt_##name(void** arguments, int64_t blocks)

#define FP16OPT_FINDING(name, Operation)                                                                         \
    FP16OPT_ENTRY(name) {                                                                                        \
        fp16opt::Shared shared;                                                                                  \
        fp16opt::for_blocks(blocks, [&](int64_t block) {                                                         \
            fp16opt::run_finding(fp16opt::argument<fp16opt::Operation>(arguments, 0),                            \
                                 fp16opt::argument<fp16opt::Lists>(arguments, 1), block, shared);                \
        });                                                                                                      \
    }
#define FP16OPT_MEASURING(name, Operation)                                                                       \
    FP16OPT_ENTRY(name) {                                                                                        \
        fp16opt::NumbersRoom room;                                                                               \
        fp16opt::for_blocks(blocks, [&](int64_t block) {                                                         \
            fp16opt::run_measuring(fp16opt::argument<fp16opt::Operation>(arguments, 0),                          \
                                   fp16opt::argument<fp16opt::Lists>(arguments, 1), block, room);                \
        });                                                                                                      \
    }
#define FP16OPT_MAPPING(name, Operation)                                                                         \
    FP16OPT_ENTRY(name) {                                                                                        \
        fp16opt::for_blocks(blocks, [&](int64_t block) {                                                         \
            fp16opt::run_mapping(fp16opt::argument<fp16opt::Operation>(arguments, 0),                            \
                                 fp16opt::argument<fp16opt::Lists>(arguments, 1), block, blocks);                \
        });                                                                                                      \
    }
#define FP16OPT_STEPPING(name, Step)                                                                             \
    FP16OPT_ENTRY(name) {                                                                                        \
        fp16opt::Shared shared;                                                                                  \
        fp16opt::StepRoom<fp16opt::Step> room;                                                                   \
        fp16opt::for_blocks(blocks, [&](int64_t block) {                                                         \
            fp16opt::run_stepping(fp16opt::argument<fp16opt::Step>(arguments, 0),                                \
                                  fp16opt::argument<fp16opt::Lists>(arguments, 1), block, shared, room);         \
        });                                                                                                      \
    }
#define FP16OPT_SINGLE(name, Operation) \
    FP16OPT_ENTRY(name) { fp16opt::argument<fp16opt::Operation>(arguments, 0).run(); (void)blocks; }

#endif
