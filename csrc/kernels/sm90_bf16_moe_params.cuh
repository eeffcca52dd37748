// Parameters of the BF16 forward megakernel and what its roles share: see sm90_bf16_moe_forward.cuh.
#pragma once

#include "csrc/gemm/sm90_task.cuh"
#include "csrc/kernels/task_span.h"
#include "csrc/layout/wait_place.h"
#include "csrc/schedule/prepared.h"

namespace mok {

/// Expert weights of one set as maps of [experts, rows, columns], boxes of 128 rows; biases null where there
/// are none, `*_stride` elements from one expert's to the next.
struct MoeExperts {
    ptx::TensorMap gate, up, down;
    const bf16* b_gate;
    const bf16* b_up;
    const bf16* b_down;
    int64_t b_gate_stride, b_up_stride, b_down_stride;
};

/// The rows that one expert set works on, as maps in boxes of 64 rows. Routed: the ring's; shared: the rank's
/// own tokens.
struct MoeRows {
    ptx::TensorMap x, hidden;
    ptx::TensorMap gate, up;  // saved; unused where the policy saves nothing
};

struct MoeForwardParams {
    MoeExperts experts[2];  // routed, shared
    MoeRows rows[2];        // routed, shared
    ptx::TensorMap saved_x;
    schedule::ScheduleShape shape;
    schedule::PreparedCall call;
    char* ring_x;  // [ring_rows, H]
    char* saved_x_rows;
    char* home_rows;        // [T K, H] in this rank's window; rank r's lies (r - rank) * window_stride behind
    char* shared_rows;      // [T, H]: y of the shared expert
    int64_t window_stride;  // bytes
    int32_t rank;
    float limit;  // of the clamped activations
    ptx::WaitLimits limits;
    TaskSpans spans;
};

namespace moe_forward_detail {

using namespace sm90;
using schedule::Counter;
using schedule::TaskKind;

/// Bits of TileTask::flags; from kWaitedShift on: 1 + the counter that was waited for, for time lines.
enum TaskFlag : int32_t { kShared = 1, kSavesGateUp = 2, kReadsSavedX = 4 };
inline constexpr int32_t kWaitedShift = 8;

MOK_DEVICE bool is_shared(const TileTask& task) {
    return (task.flags & kShared) != 0;
}
MOK_DEVICE bool is_gate_up(const TileTask& task) {
    return task.kind == static_cast<int32_t>(TaskKind::kGateUp);
}
MOK_DEVICE bool saves(const TileTask& task) {
    return (task.flags & kSavesGateUp) != 0;
}
MOK_DEVICE const MoeExperts& experts_of(const MoeForwardParams& params, const TileTask& task) {
    return params.experts[task.flags & kShared];
}
MOK_DEVICE const MoeRows& rows_of(const MoeForwardParams& params, const TileTask& task) {
    return params.rows[task.flags & kShared];
}
/// Width of the task's expert: I or J.
MOK_DEVICE int32_t inner_of(const MoeForwardParams& params, const TileTask& task) {
    const schedule::ScheduleSizes& sizes = params.shape.sizes;
    return static_cast<int32_t>(is_shared(task) ? sizes.shared_intermediate : sizes.intermediate);
}
/// A recomputation makes gate and up alone.
MOK_DEVICE bool makes_hidden(const MoeForwardParams& params) {
    return params.shape.sizes.pass == schedule::Pass::kForward;
}
MOK_DEVICE int32_t k_steps(const MoeForwardParams& params, const TileTask& task) {
    const int32_t depth =
        is_gate_up(task) ? static_cast<int32_t>(params.shape.sizes.hidden) : inner_of(params, task);
    return ceil_div(depth, static_cast<int32_t>(kTileK));
}
/// Where row block `block` lies in the ring.
MOK_DEVICE int32_t ring_row(const schedule::ScheduleShape& shape, int32_t block) {
    return block % shape.ring_blocks * shape.block_m;
}

MOK_DEVICE uint32_t* counter_address(const MoeForwardParams& params, Counter counter, int32_t index) {
    return params.call.counters + schedule::block_counter_begin(params.shape, *params.call.table, counter) +
           index;
}

MOK_DEVICE ptx::Deadline deadline_at(const MoeForwardParams& params, WaitPlace place) {
    return ptx::Deadline(params.limits, static_cast<uint32_t>(place));
}

}  // namespace moe_forward_detail

}  // namespace mok
