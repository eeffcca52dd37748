#include "csrc/kernels/sm90_bf16_moe_backward.cuh"
#include "csrc/launch/moe_backward_kernel.cuh"

namespace mok::launch {

template <>
MoeBackwardKernel moe_backward_kernel<ActivationForm::kGptOss>(bool timeline) {
    return timeline ? sm90_bf16_moe_backward_kernel<ActivationForm::kGptOss, true>
                    : sm90_bf16_moe_backward_kernel<ActivationForm::kGptOss, false>;
}

}  // namespace mok::launch
