// Split masters.
#include "../cuda_api_steps.h"
#include "../launch/cuda_launch.cuh"
#include "../launch/cuda_split.cuh"

namespace fp16opt {

namespace {

void require_split(const CudaTable& table, int64_t n, int master, int model, int remainder) {
    table.require(3, n);
    table.require_dtypes(master, {DType::single});
    table.require_dtypes(model, {DType::half, DType::bfloat16});
    table.require_dtypes(remainder, {DType::half});
}

}  // namespace

void cuda_split(const Launch& launch, int32_t* overflow, int64_t n) {
    require_split(launch.table, n, 0, 1, 2);
    launch_finding("multi_tensor_split", launch, Split{overflow});
}

void cuda_renew(const Launch& launch, const int64_t* now, const int64_t* then, int32_t* taken, int64_t n) {
    launch.table.require(2, n);
    launch.table.require_dtypes(0, {DType::half, DType::bfloat16});
    launch.table.require_dtypes(1, {DType::half});
    launch_mapping("multi_tensor_renew", launch, Renew{now, then, taken});
}

void cuda_join(const Launch& launch) {
    require_split(launch.table, INT64_MAX, 2, 0, 1);
    launch_mapping("multi_tensor_join", launch, Join{});
}

}  // namespace fp16opt
