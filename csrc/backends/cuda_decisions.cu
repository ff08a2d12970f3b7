// Decisions and bookkeeping between the passes over tensors: one block each.
#include "../launch/cuda_decisions.cuh"

#include "../launch/cuda_launch.cuh"

namespace fp16opt {

#if defined(__CUDACC__)
template <class Operation>
__global__ void __launch_bounds__(kThreads) single_kernel(const Operation operation) {
    operation.run();
}
#endif

namespace {

template <class Operation>
void launch_single(const char* name, const CudaPlace& place, Operation operation) {
#if defined(__CUDACC__)
    const OnDevice on_device(place.device, name);
    void* arguments[] = {&operation};
    check_cuda(cudaLaunchKernel(reinterpret_cast<const void*>(single_kernel<Operation>), dim3(1), dim3(kThreads),
                                arguments, 0, static_cast<cudaStream_t>(place.stream)),
               name);
#else
    (void)name;
    (void)place;
    operation.run();
#endif
}

}  // namespace

void cuda_capture_scale(const CudaPlace& place, const float* scale, float* pair) {
    launch_single("capture_scale", place, CaptureScale{scale, pair});
}

void cuda_decide_clip(const CudaPlace& place, const double* norm, const float* found_inf, double max_norm,
                      bool only_finite, float* single, float* factor) {
    launch_single("decide_clip", place, DecideClip{norm, found_inf, max_norm, only_finite, single, factor});
}

void cuda_close_step(const CudaPlace& place, const CudaClosing& closing) {
    launch_single("close_step", place, CloseStep{closing});
}

}  // namespace fp16opt
