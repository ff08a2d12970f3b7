// The one-pass step of SGD.
#include "../launch/cuda_stepping.cuh"

namespace fp16opt {

void cuda_sgd(const Launch& launch, const CudaStep& step, bool has_momentum) {
    SgdStep operation;
    static_cast<StepCommon&>(operation) = common_of(launch, step, has_momentum ? 1 : 0);
    operation.groups = static_cast<const SgdGroup*>(step.groups);
    operation.has_momentum = has_momentum;
    launch_stepping("multi_tensor_sgd", launch, operation);
}

}  // namespace fp16opt
