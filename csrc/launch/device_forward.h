// The whole forward of a layer on a GPU, or the recomputation of its context: from a rank's tensors to its
// output, in stream order.
#pragma once

#include <cstdint>

#include "csrc/launch/device_call.h"
#include "csrc/launch/weight_view.h"

namespace mok::launch {

/// Tensors on the workspace's device, BF16 but for the FP32 weights of routes and tokens. Addresses and
/// strides of weights are multiples of 16 bytes, x may lie anywhere.
struct DeviceForward {
    CallHeader header;  // kind kForward or kRecompute, settings and T; offsets are filled in
    CallTensors tensors;
    const float* topk_weights;  // [T, K], contiguous; forward only
    MoeExpertViews routed, shared;
    const float* shared_weight;  // [T]; null: 1
    float limit;                 // of the clamped activations

    void* out;  // [T, H]; forward only
    int64_t out_stride;

    // The context, rows of the first chunk at their places in the plan; null where header.save keeps nothing.
    // Rows of half blocks without a route are left alone.
    void* saved_x;     // [save_rows, H]
    void* saved_gate;  // [save_rows, I]
    void* saved_up;    // [save_rows, I]
    int64_t save_rows;
    void* saved_shared_gate;  // [T, J]
    void* saved_shared_up;    // [T, J]
};

/// A forward on `stream` (a cudaStream_t), in two steps: the peers wait for none that failed in the first, if
/// they are told. Right under graph capture once a call with the same sizes has run.
class DeviceForwardRun {
  public:
    /// Takes the workspace and temporary memory. Throws std::invalid_argument, CudaError, HeapError where no
    /// memory is left, and what has ended the workspace.
    DeviceForwardRun(Workspace& workspace, const DeviceForward& forward, void* stream);

    /// Once; returns when all is in the stream. Throws CudaError.
    void launch();

  private:
    Workspace& workspace_;
    const DeviceForward forward_;
    DeviceCall call_;
    Preparation preparation_{};
    CallMemory memory_;  // none where there is nothing to do
};

/// Temporary device memory of such a call besides the preparation's, in bytes.
int64_t device_forward_bytes(const Preparation& preparation);

}  // namespace mok::launch
