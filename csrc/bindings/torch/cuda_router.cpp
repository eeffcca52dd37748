// torch.ops.mok.router_top_k over CUDA tensors; mok/router/_choice.py has its schema, its fake and the CPU's.
#if defined(MOK_WITH_CUDA)

#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>

#include "csrc/bindings/torch/cuda_arguments.h"
#include "csrc/bindings/torch/op_errors.h"
#include "csrc/launch/router_top_k.h"

namespace mok::bindings {

namespace {

/// scores float32 [T, E], bias float32 [E]; ids int64 [T, K].
Tensor router_top_k(const Tensor& scores, const std::optional<Tensor>& bias, int64_t top_k) {
    return run_op([&] {
        MOK_CHECK(scores.dim() == 2, "scores must be [T, E].");
        launch::RouterTopK choice{};
        choice.tokens = scores.size(0);
        choice.experts = scores.size(1);
        choice.top_k = top_k;
        choice.scores = cuda_data<float>(scores, "scores", ScalarType::Float, 0);
        if (bias) {
            MOK_CHECK(bias->dim() == 1 && bias->size(0) == choice.experts, "bias must be [", choice.experts,
                      "].");
            choice.bias = cuda_data<float>(*bias, "bias", ScalarType::Float, choice.experts);
            MOK_CHECK(bias->get_device_index() == scores.get_device_index(),
                      "bias is on cuda:", bias->get_device_index(),
                      " and scores on cuda:", scores.get_device_index(), ".");
        }
        MOK_CHECK(top_k >= 1, "top_k = ", top_k, ": must be at least 1.");
        const CudaCall call(scores);
        const std::array<int64_t, 2> sizes{choice.tokens, top_k};
        Tensor ids = torch::stable::new_empty(scores, {sizes.data(), sizes.size()}, ScalarType::Long);
        choice.ids = static_cast<int64_t*>(ids.data_ptr());
        launch::launch_router_top_k(choice, call.stream());
        return ids;
    });
}

}  // namespace

}  // namespace mok::bindings

STABLE_TORCH_LIBRARY_IMPL(mok, CUDA, library) {
    library.impl("router_top_k", TORCH_BOX(&mok::bindings::router_top_k));
}

#endif  // MOK_WITH_CUDA
