#include "csrc/launch/launch.cuh"
#include "csrc/launch/moe_backward_kernel.cuh"
#include "csrc/launch/moe_backward_params.h"
#include "csrc/launch/sm90_bf16_moe_backward.h"

namespace mok::launch {

namespace {

MoeBackwardKernel pick(int32_t activation, bool timeline) {
    switch (static_cast<ActivationForm>(activation)) {
        case ActivationForm::kSwiglu:
            return moe_backward_kernel<ActivationForm::kSwiglu>(timeline);
        case ActivationForm::kSwigluLimit:
            return moe_backward_kernel<ActivationForm::kSwigluLimit>(timeline);
        case ActivationForm::kGptOss:
            return moe_backward_kernel<ActivationForm::kGptOss>(timeline);
    }
    throw std::invalid_argument(concat("activation number ", activation, ": must be 0 to 2."));
}

}  // namespace

void load_sm90_bf16_moe_backward(bool timeline) {
    for (const ActivationForm form :
         {ActivationForm::kSwiglu, ActivationForm::kSwigluLimit, ActivationForm::kGptOss}) {
        load_kernel("loading mok's backward kernel", pick(static_cast<int32_t>(form), timeline));
    }
}

void launch_sm90_bf16_moe_backward(const MoeBackward& backward, void* stream) {
    const MoeBackwardParams params = moe_backward_params(backward);
    // One block per multiprocessor of the schedule; they need not all be resident.
    launch("mok's backward kernel", pick(backward.activation, backward.spans.tasks != nullptr),
           {static_cast<uint32_t>(backward.shape.sizes.num_sms), sm90::kThreads,
            moe_backward_detail::kSharedBytes},
           stream, params);
}

}  // namespace mok::launch
