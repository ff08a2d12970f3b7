// Norms, casts and samples: operations that report something for each tensor.
#include "../launch/cuda_launch.cuh"

namespace fp16opt {

void cuda_l2norm(const Launch& launch, double* sumsq, int64_t n, double* norm, double* norms) {
    launch.table.require(1, n);
    launch.table.require_dtypes(0, {DType::half, DType::bfloat16, DType::single});
    launch_finding("multi_tensor_l2norm", launch, Norm{sumsq, n, norm, norms});
}

void cuda_cast(const Launch& launch, int32_t* overflow, int64_t n) {
    launch.table.require(2, n);
    launch.table.require_dtypes(0, {DType::single});
    launch.table.require_dtypes(1, {DType::half, DType::bfloat16});
    launch_finding("multi_tensor_cast", launch, Cast{overflow});
}

void cuda_sample(const Launch& launch, int64_t* samples, int64_t n) {
    launch.table.require(1, n);
    launch.table.require_dtypes(0, {DType::half, DType::bfloat16});
    launch_finding("multi_tensor_sample", launch, Sample{samples});
}

}  // namespace fp16opt
