// Kernels out of programs, and how they are launched. Compiled without nvcc, "launching" runs the blocks one after the
// other on the host.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda_layout.h"
#include "cuda_operations.cuh"

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#endif

namespace fp16opt {

// Mapping kernels may find nothing to do, so there are only as many blocks as keep any GPU busy.
constexpr int64_t kMostMappingBlocks = 2048;

#if defined(__CUDACC__)

inline void check_cuda(cudaError_t error, const char* operation) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // else the next call that asks for the last error would report this one again
    throw std::runtime_error(std::string(operation) + ": CUDA reports " + cudaGetErrorName(error) + ": " +
                             cudaGetErrorString(error));
}

// Makes a device current, and the one before it again.
class OnDevice {
public:
    OnDevice(int device, const char* operation) {
        check_cuda(cudaGetDevice(&before_), operation);
        if (device != before_) check_cuda(cudaSetDevice(device), operation);
        changed_ = device != before_;
    }
    ~OnDevice() {
        if (changed_) cudaSetDevice(before_);
    }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

private:
    int before_ = 0;
    bool changed_ = false;
};

// As many blocks at a time on a multiprocessor as registers allow without spilling.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200
#define FP16OPT_BLOCKS 2
#else
#define FP16OPT_BLOCKS 3
#endif

template <class Operation>
__global__ void __launch_bounds__(kThreads, FP16OPT_BLOCKS) finding_kernel(const Operation operation, const Lists lists) {
    __shared__ Shared shared;
    run_finding(operation, lists, int64_t(blockIdx.x), shared);
}

template <class Operation>
__global__ void __launch_bounds__(kThreads) mapping_kernel(const Operation operation, const Lists lists) {
    run_mapping(operation, lists, int64_t(blockIdx.x), int64_t(gridDim.x));
}

template <class Operation>
void launch_blocks(void (*kernel)(Operation, Lists), const char* name, const Launch& launch, Operation operation,
                   Lists lists, int64_t blocks) {
    if (blocks > 0x7fffffff) throw std::invalid_argument(std::string(name) + ": more than 2^31 chunks in one call");
    const OnDevice on_device(launch.device, name);
    void* arguments[] = {&operation, &lists};
    check_cuda(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(unsigned(blocks)), dim3(kThreads), arguments,
                                0, static_cast<cudaStream_t>(launch.stream)),
               name);
}

#endif

template <class Operation>
void launch_finding(const char* name, const Launch& launch, const Operation& operation) {
    const Lists view = lists_of(launch.table, launch.memory);
    const int64_t blocks = view.chunk_count > 0 ? view.chunk_count : 1;  // empty tensors have statistics too
#if defined(__CUDACC__)
    launch_blocks(finding_kernel<Operation>, name, launch, operation, view, blocks);
#else
    (void)name;
    Shared shared;
    const Order order(blocks);
    for (int64_t i = 0; i < blocks; ++i) run_finding(operation, view, order.at(i), shared);
#endif
}

template <class Operation>
void launch_mapping(const char* name, const Launch& launch, const Operation& operation) {
    const Lists view = lists_of(launch.table, launch.memory);
    const int64_t blocks = view.chunk_count < kMostMappingBlocks ? view.chunk_count : kMostMappingBlocks;
    if (blocks == 0) return;
#if defined(__CUDACC__)
    launch_blocks(mapping_kernel<Operation>, name, launch, operation, view, blocks);
#else
    (void)name;
    const Order order(blocks);
    for (int64_t i = 0; i < blocks; ++i) run_mapping(operation, view, order.at(i), blocks);
#endif
}

}  // namespace fp16opt
