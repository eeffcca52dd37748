// The backward megakernel's instances. Each activation has a .cu file of its own, because ptxas takes the
// kernels of a file one after the other, longer than any other file of the library.
#pragma once

#include "csrc/gemm/activation.cuh"
#include "csrc/kernels/sm90_bf16_moe_backward_params.cuh"

namespace mok::launch {

using MoeBackwardKernel = void (*)(MoeBackwardParams);

/// The kernel that records the time line, or the one that does not.
template <ActivationForm kForm>
MoeBackwardKernel moe_backward_kernel(bool timeline);

template <>
MoeBackwardKernel moe_backward_kernel<ActivationForm::kSwiglu>(bool timeline);
template <>
MoeBackwardKernel moe_backward_kernel<ActivationForm::kSwigluLimit>(bool timeline);
template <>
MoeBackwardKernel moe_backward_kernel<ActivationForm::kGptOss>(bool timeline);

}  // namespace mok::launch
