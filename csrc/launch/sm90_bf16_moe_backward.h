// The BF16 backward megakernel of Hopper: what a call gives it, and its launch.
#pragma once

#include <cstdint>

#include "csrc/kernels/task_span.h"
#include "csrc/launch/weight_view.h"
#include "csrc/ptx/wait_record.h"
#include "csrc/schedule/prepared.h"

namespace mok::launch {

/// Device memory of one call on one rank, BF16 where nothing else is said; addresses and strides are
/// multiples of 16 bytes, matrices without a stride have rows without gaps. What a pass does not use may be
/// null.
struct MoeBackward {
    schedule::ScheduleShape shape;  // pass kBackward, made with choose_config(Arch::kSm90, ...)
    schedule::PreparedCall call;
    MoeExpertViews routed;
    MoeExpertViews shared;  // where shape.sizes.shared_intermediate > 0
    const void* x;          // [T, H]: this rank's own tokens, for the shared expert
    int64_t x_stride;       // bytes
    const void* dout;       // [T, H], the same
    int64_t dout_stride;

    void* ring_x;          // [ring_rows, H]
    void* ring_dout;       // [ring_rows, H]
    void* ring_gate;       // [ring_rows, I]: of chunks that forward did not save
    void* ring_up;         // [ring_rows, I]
    void* ring_dgate;      // [ring_rows, I]
    void* ring_dup;        // [ring_rows, I]
    void* ring_hidden;     // [ring_rows, I]: h'
    float* ring_partials;  // [ring_rows, ceil(I / 64)]
    float* ring_weights;   // [ring_rows]: where b_down's gradient is wanted
    float* accumulators;   // gate, up [I, H], down [H, I], b_gate, b_up [I], b_down [H]: where a segment may
                           // be longer than the ring
    void* shared_gate;     // [T, J]: saved by forward, or for this pass to fill
    void* shared_up;       // [T, J]
    void* shared_dgate;    // [T, J]
    void* shared_dup;      // [T, J]
    void* shared_hidden;   // [T, J]
    float* shared_partials;  // [T, ceil(J / 64)]

    // What forward saved of the first chunk; null where the policy saves nothing. Gate and up of a half block
    // (64 rows) without routes may hold anything: the GPU forward leaves them, and nothing here reads them.
    const void* saved_x;     // [save_rows, H]
    const void* saved_gate;  // [save_rows, I]
    const void* saved_up;    // [save_rows, I]
    int64_t save_rows;

    const float* weights;        // [max_tokens * K] in this rank's window
    void* home_rows;             // [max_tokens * K, H] in this rank's window: dx of its routes
    float* home_weight_grads;    // [max_tokens * K] in this rank's window
    int64_t window_stride;       // bytes
    void* shared_rows;           // [T, H]: the shared expert's dx
    const float* shared_weight;  // [T]; null: 1
    float* shared_weight_grads;  // [T]
    MoeGradientViews routed_gradients;
    MoeGradientViews shared_gradients;
    bool accumulate;  // gradients are added to what their memory holds

    int32_t activation;  // as cpu::Activation
    float limit;
    int32_t rank;
    ptx::WaitLimits limits;
    TaskSpans spans{};  // with `tasks` set, the time line is recorded
};

/// As load_sm90_bf16_moe_forward.
void load_sm90_bf16_moe_backward(bool timeline = false);

/// On `stream` (a cudaStream_t); returns at once. Throws std::invalid_argument and CudaError.
void launch_sm90_bf16_moe_backward(const MoeBackward& backward, void* stream);

/// Floats of MoeBackward::accumulators.
constexpr int64_t moe_backward_accumulators(int64_t hidden, int64_t intermediate) {
    return 3 * hidden * intermediate + 2 * intermediate + hidden;
}

}  // namespace mok::launch
