// Operations on elements alone, and what else has to be asked of CUDA.
#include "../launch/cuda_launch.cuh"

namespace fp16opt {

void cuda_scale(const Launch& launch, const float* factor) {
    launch.table.require(1, INT64_MAX);
    launch.table.require_dtypes(0, {DType::half, DType::bfloat16, DType::single});
    launch_mapping("multi_tensor_scale", launch, Scale{factor});
}

void cuda_axpby(const Launch& launch, float a, float b, bool check_x, bool check_y, float* found_inf) {
    launch.table.require(3, INT64_MAX);
    for (int list = 0; list < 3; ++list) {
        launch.table.require_dtypes(list, {DType::half, DType::bfloat16, DType::single});
    }
    launch_mapping("multi_tensor_axpby", launch, Axpby{a, b, check_x, check_y, found_inf});
}

void cuda_unscale_clipped(const Launch& launch, const float* inv_scale, const float* factor) {
    launch.table.require(2, INT64_MAX);
    launch.table.require_dtypes(0, {DType::half, DType::bfloat16, DType::single});
    launch.table.require_dtypes(1, {DType::single});
    launch_mapping("multi_tensor_unscale_clipped", launch, UnscaleClipped{inv_scale, factor});
}

void cuda_take(const Launch& launch, const int64_t* now, const int64_t* then, int32_t* taken, int64_t n) {
    launch.table.require(2, n);
    launch.table.require_dtypes(0, {DType::single});
    launch.table.require_dtypes(1, {DType::half, DType::bfloat16});
    launch_mapping("multi_tensor_take", launch, Take{now, then, taken});
}

#if defined(__CUDACC__)

bool cuda_runs_on(int device) {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || device < 0 || device >= count) {
        cudaGetLastError();
        return false;
    }
    const OnDevice on_device(device, "fp16opt");
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, mapping_kernel<Scale>);
    if (error != cudaSuccess) cudaGetLastError();
    return error == cudaSuccess;
}

void* cuda_keep(const void* host, int64_t copied, int64_t all, int device) {
    const char* name = "the pointer table of a captured graph";
    const OnDevice on_device(device, name);
    // Allocating and copying on another stream is no part of the graph, and is allowed while it is captured.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    check_cuda(cudaThreadExchangeStreamCaptureMode(&mode), name);
    void* memory = nullptr;
    cudaStream_t stream = nullptr;
    cudaError_t error = cudaMalloc(&memory, size_t(all));
    if (error == cudaSuccess) error = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
    if (error == cudaSuccess) error = cudaMemcpyAsync(memory, host, size_t(copied), cudaMemcpyHostToDevice, stream);
    if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
    if (stream != nullptr) cudaStreamDestroy(stream);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess && memory != nullptr) cuda_give_back(memory, device);
    check_cuda(error, name);
    return memory;
}

void cuda_give_back(void* memory, int device) noexcept {
    int before = 0;
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // another graph may be captured meanwhile
    if (cudaGetDevice(&before) == cudaSuccess && cudaSetDevice(device) == cudaSuccess &&
        cudaThreadExchangeStreamCaptureMode(&mode) == cudaSuccess) {
        cudaFree(memory);
        cudaThreadExchangeStreamCaptureMode(&mode);
        cudaSetDevice(before);
    }
    cudaGetLastError();
}

#else

bool cuda_runs_on(int device) { return device == 0; }

void* cuda_keep(const void* host, int64_t copied, int64_t all, int) {
    char* memory = new char[size_t(all)];
    memcpy(memory, host, size_t(copied));
    return memory;
}

void cuda_give_back(void* memory, int) noexcept { delete[] static_cast<char*>(memory); }

#endif

}  // namespace fp16opt
