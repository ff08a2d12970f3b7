// Unscaling: the operation with the most code, in a unit of its own so that units compile side by side.
#include "../launch/cuda_launch.cuh"

namespace fp16opt {

void cuda_unscale(const Launch& launch, const float* inv_scale, const CudaGradRows& rows) {
    const bool watched = rows.hashes != nullptr;
    launch.table.require(2, watched, rows.n);
    launch.table.require_dtypes(0, {DType::half, DType::bfloat16, DType::single, DType::wide});
    launch.table.require_dtypes(1, {DType::single, DType::wide});
    launch_finding("multi_tensor_unscale", launch,
                   Unscale{inv_scale, rows.nonfinite, rows.sumsq, rows.n, rows.norm, rows.found_inf, rows.hashes,
                           rows.samples},
                   2 + int(watched));
}

}  // namespace fp16opt
