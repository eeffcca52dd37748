// The whole backward of a layer on a GPU: from a rank's tensors to its gradients, in stream order.
#pragma once

#include <cstdint>

#include "csrc/launch/device_call.h"
#include "csrc/launch/weight_view.h"

namespace mok::launch {

/// What forward kept of the first chunk: null where the policy keeps nothing.
struct DeviceContext {
    const void* x = nullptr;     // [rows, H]
    const void* gate = nullptr;  // [rows, I]
    const void* up = nullptr;    // [rows, I]
    int64_t rows = 0;
    void* shared_gate = nullptr;  // [T, J]
    void* shared_up = nullptr;    // [T, J]
};

/// Tensors on the workspace's device, BF16 but for the FP32 weights of routes and tokens and the gradients.
struct DeviceBackward {
    CallHeader header;  // kind kBackward, settings and T; offsets are filled in
    CallTensors tensors;
    const float* topk_weights;  // [T, K], contiguous
    MoeExpertViews routed, shared;
    const float* shared_weight;  // [T]; null: 1
    DeviceContext saved;
    float limit;  // of the clamped activations

    void* dx;  // [T, H], where header.gradients asks for it, as are the next two
    int64_t dx_stride;
    float* topk_weight_grads;    // [T, K]; a choice that is no route gets 0
    float* shared_weight_grads;  // [T]
    MoeGradientViews routed_gradients, shared_gradients;
    bool accumulate;
};

/// A backward on `stream` (a cudaStream_t), in two steps as DeviceForwardRun, which has the errors. Right
/// under graph capture once a call with the same sizes has run.
class DeviceBackwardRun {
  public:
    DeviceBackwardRun(Workspace& workspace, const DeviceBackward& backward, void* stream);

    /// Once; returns when all is in the stream. Throws CudaError.
    void launch();

  private:
    Workspace& workspace_;
    const DeviceBackward backward_;
    DeviceCall call_;
    Preparation preparation_{};
    CallMemory memory_;
};

/// Temporary device memory of such a call besides the preparation's, in bytes.
int64_t device_backward_bytes(const schedule::ScheduleShape& shape, const PlanShape& plan);

}  // namespace mok::launch
