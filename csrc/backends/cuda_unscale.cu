// Unscaling: the operation with the most code, in a unit of its own so that units compile side by side.
#include "../launch/cuda_launch.cuh"

namespace fp16opt {

namespace {

void require_grads(const CudaTable& table, bool write = true) {
    table.require_dtypes(0, {DType::half, DType::bfloat16, DType::single});
    if (write) table.require_dtypes(1, {DType::single});  // else they are not touched
}

}  // namespace

void cuda_unscale(const Launch& launch, const float* inv_scale, const CudaGradRows& rows) {
    launch.table.require(rows.write ? 2 : launch.table.lists(), rows.n);
    require_grads(launch.table, rows.write);
    launch_finding("multi_tensor_unscale", launch,
                   Unscale{inv_scale, rows.nonfinite, rows.sumsq, rows.n, rows.norm, rows.found_inf, rows.write});
}

}  // namespace fp16opt
