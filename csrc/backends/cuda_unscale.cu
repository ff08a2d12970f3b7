// Unscaling: the operation with the most code, in a unit of its own so that units compile side by side.
#include "../launch/cuda_launch.cuh"

namespace fp16opt {

namespace {

void require_grads(const CudaTable& table, bool write = true) {
    table.require_dtypes(0, {DType::half, DType::bfloat16, DType::single, DType::wide});
    if (write) table.require_dtypes(1, {DType::single, DType::wide});  // else they are not touched
}

void require_watched(const CudaTable& table, const int64_t* hashes) {
    if (hashes != nullptr && !table.watches()) {
        throw std::invalid_argument("there is memory for hashes, and the table watches no tensors");
    }
}

}  // namespace

void cuda_unscale(const Launch& launch, const float* inv_scale, const CudaGradRows& rows) {
    launch.table.require(2, rows.n);
    require_grads(launch.table, rows.write);
    require_watched(launch.table, rows.hashes);
    launch_finding("multi_tensor_unscale", launch,
                   Unscale{inv_scale, rows.nonfinite, rows.sumsq, rows.n, rows.norm, rows.found_inf, rows.hashes,
                           rows.samples, rows.write});
}

void cuda_unscale_clipped(const Launch& launch, const float* inv_scale, const float* factor, int64_t* hashes,
                          int64_t* samples, int64_t n) {
    launch.table.require(2, n);
    require_grads(launch.table);
    require_watched(launch.table, hashes);
    launch_finding("multi_tensor_unscale_clipped", launch, UnscaleClipped{inv_scale, factor, hashes, samples});
}

}  // namespace fp16opt
