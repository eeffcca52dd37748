#include "csrc/kernels/sm90_bf16_moe_backward.cuh"
#include "csrc/launch/moe_backward_kernel.cuh"

namespace mok::launch {

template <>
MoeBackwardKernel moe_backward_kernel<ActivationForm::kSwigluLimit>(bool timeline) {
    return timeline ? sm90_bf16_moe_backward_kernel<ActivationForm::kSwigluLimit, true>
                    : sm90_bf16_moe_backward_kernel<ActivationForm::kSwigluLimit, false>;
}

}  // namespace mok::launch
