// The BF16 forward megakernel of Hopper: what a call gives it, and its launch.
#pragma once

#include <cstdint>

#include "csrc/kernels/task_span.h"
#include "csrc/launch/weight_view.h"
#include "csrc/ptx/wait_record.h"
#include "csrc/schedule/prepared.h"

namespace mok::launch {

/// Device memory of one call on one rank, BF16; addresses and strides are multiples of 16 bytes, matrices
/// without a stride have rows without gaps.
struct MoeForward {
    schedule::ScheduleShape shape;  // pass kForward or kRecompute, made with choose_config(Arch::kSm90, ...)
    schedule::PreparedCall call;
    MoeExpertViews routed;
    MoeExpertViews shared;  // where shape.sizes.shared_intermediate > 0
    const void* x;          // [T, H]: this rank's own tokens, for the shared expert
    int64_t x_stride;       // bytes

    void* ring_x;         // [ring_rows, H]
    void* ring_hidden;    // [ring_rows, I]; unused by kRecompute, as are the next four
    void* shared_hidden;  // [T, J]
    void* shared_rows;    // [T, H]: the shared expert's y
    void* home_rows;      // [max_tokens * K, H] in this rank's window
    int64_t window_stride;

    // The context, rows of the first chunk at their places in the plan; null where the policy saves nothing.
    // Rows that pad a half block with a valid row become zeros, others without a route are left alone.
    void* saved_x;     // [save_rows, H]
    void* saved_gate;  // [save_rows, I]
    void* saved_up;    // [save_rows, I]
    int64_t save_rows;
    void* saved_shared_gate;  // [T, J]
    void* saved_shared_up;    // [T, J]

    int32_t activation;  // as cpu::Activation
    float limit;
    int32_t rank;
    ptx::WaitLimits limits;
    TaskSpans spans{};  // with `tasks` set, the time line is recorded
};

/// Makes the kernels resident on the current device, as load_peer_kernels does: those that record no time
/// line, or those that do.
void load_sm90_bf16_moe_forward(bool timeline = false);

/// On `stream` (a cudaStream_t); returns at once. Throws std::invalid_argument and CudaError.
void launch_sm90_bf16_moe_forward(const MoeForward& forward, void* stream);

}  // namespace mok::launch
