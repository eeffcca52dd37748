// Parameters of the BF16 forward megakernel and what its roles share: see sm90_bf16_moe_forward.cuh.
#pragma once

#include "csrc/kernels/sm90_bf16_moe_call.cuh"

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

struct MoeForwardParams : MoeCallParams {
    MoeExperts experts[2];  // routed, shared
    MoeRows rows[2];        // routed, shared
    ptx::TensorMap saved_x;
};

namespace moe_forward_detail {

using namespace moe_detail;

/// Bits of TileTask::flags besides moe_detail's.
enum TaskFlag : int32_t { kSavesGateUp = 2, kReadsSavedX = 4 };

MOK_DEVICE bool is_gate_up(const TileTask& task) {
    return is_kind(task, TaskKind::kGateUp);
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
/// A recomputation makes gate and up alone.
MOK_DEVICE bool makes_hidden(const MoeForwardParams& params) {
    return params.shape.sizes.pass == schedule::Pass::kForward;
}
MOK_DEVICE int32_t k_steps(const MoeForwardParams& params, const TileTask& task) {
    return steps_of(is_gate_up(task) ? hidden_of(params) : inner_of(params, task));
}

}  // namespace moe_forward_detail

}  // namespace mok
