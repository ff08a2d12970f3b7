// Unscaling: the operation with the most code, in a unit of its own so that units compile side by side.
#include "../launch/cuda_launch.cuh"

namespace fp16opt {

namespace {

void require_grads(const CudaTable& table) {
    table.require_dtypes(0, {DType::half, DType::bfloat16, DType::single, DType::wide});
    table.require_dtypes(1, {DType::single, DType::wide});
}

}  // namespace

void cuda_unscale(const Launch& launch, const float* inv_scale, const CudaGradRows& rows) {
    launch.table.require(2, rows.n);
    require_grads(launch.table);
    if (launch.table.watches() != (rows.hashes != nullptr)) {
        throw std::invalid_argument("a table that watches tensors and memory for their hashes go together");
    }
    launch_finding("multi_tensor_unscale", launch,
                   Unscale{inv_scale, rows.nonfinite, rows.sumsq, rows.n, rows.norm, rows.found_inf, rows.hashes,
                           rows.samples, rows.write});
}

void cuda_unscale_clipped(const Launch& launch, const float* inv_scale, const float* factor) {
    launch.table.require(2, INT64_MAX);
    require_grads(launch.table);
    launch_mapping("multi_tensor_unscale_clipped", launch, UnscaleClipped{inv_scale, factor});
}

}  // namespace fp16opt
