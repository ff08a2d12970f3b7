// The one-pass step of Lion.
#include "../launch/cuda_stepping.cuh"

namespace fp16opt {

void cuda_lion(const Launch& launch, const CudaStep& step) {
    LionStep operation;
    static_cast<StepCommon&>(operation) = common_of(launch, step, 1);
    operation.groups = static_cast<const LionGroup*>(step.groups);
    launch_stepping("multi_tensor_lion", launch, operation);
}

}  // namespace fp16opt
