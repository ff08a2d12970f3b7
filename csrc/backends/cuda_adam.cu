// The one-pass step of Adam and AdamW.
#include "../launch/cuda_stepping.cuh"

namespace fp16opt {

void cuda_adam(const Launch& launch, const CudaStep& step, bool amsgrad) {
    AdamStep operation;
    static_cast<StepCommon&>(operation) = common_of(launch, step, amsgrad ? 3 : 2);
    operation.groups = static_cast<const AdamGroup*>(step.groups);
    operation.amsgrad = amsgrad;
    launch_stepping("multi_tensor_adam", launch, operation);
}

}  // namespace fp16opt
