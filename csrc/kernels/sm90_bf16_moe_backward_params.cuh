// Parameters of the BF16 backward megakernel and what its roles share: see sm90_bf16_moe_backward.cuh.
#pragma once

#include "csrc/gemm/sm90_chunks.cuh"
#include "csrc/kernels/sm90_bf16_moe_call.cuh"

namespace mok {

/// Expert weights of one set as maps of [experts, rows, columns]. Biases are null where there are none.
struct MoeBackwardExperts {
    ptx::TensorMap gate_rows, up_rows;  // boxes of 128 rows, for recomputing gate and up
    ptx::TensorMap gate, up, down;      // boxes of 64 rows of K
    const bf16* b_gate;
    const bf16* b_up;
    const bf16* b_down;
    int64_t b_gate_stride, b_up_stride, b_down_stride;  // elements from one expert's to the next
};

/// The rows that one expert set works on, as maps in boxes of 64 rows. Routed: the ring's; shared: the rank's
/// own tokens, gate and up where forward or this pass left them.
struct MoeBackwardRows {
    ptx::TensorMap x, dout;
    ptx::TensorMap gate, up;
    ptx::TensorMap dgate, dup, hidden;  // hidden: h' = rn(w p)
    float* weight_partials;             // [rows, ceil(inner / 64)] sums over 64 columns of p a
};

/// Weight gradients of one set as maps of [experts, rows, columns], boxes of 64 rows and 128 bytes; their
/// biases', [experts, columns]. In the order of schedule::Matrix.
struct MoeGradients {
    ptx::TensorMap weight[schedule::kNumMatrices];
    void* bias[schedule::kNumMatrices];
    int64_t bias_stride[schedule::kNumMatrices];  // elements from one expert's to the next
    uint32_t float32;                             // bit m: weight m is FP32, bit 3 + m: bias m; else BF16
};

/// The sums of the cut segment that is in work: FP32.
struct MoeAccumulators {
    ptx::TensorMap weight[schedule::kNumMatrices];  // as MoeGradients, of one expert
    float* bias[schedule::kNumMatrices];
};

struct MoeBackwardParams : MoeCallParams {
    MoeBackwardExperts experts[2];  // routed, shared
    MoeBackwardRows rows[2];        // routed, shared
    ptx::TensorMap saved_x, saved_gate, saved_up;
    MoeGradients gradients[2];  // routed, shared
    MoeAccumulators accumulators;
    bool accumulate;             // gradients are added to what their memory holds
    float* row_weights;          // [ring_rows]: w of each row, for b_down's gradient
    const float* weights;        // [T K] in this rank's window
    float* home_weight_grads;    // [T K] in this rank's window
    const float* shared_weight;  // [T]; null: 1
    float* shared_weight_grads;  // [T]
};

namespace moe_backward_detail {

using namespace moe_detail;
using schedule::Matrix;

/// Bits of BackwardTask::flags besides moe_detail's.
enum BackwardFlag : int32_t {
    kSavedX = 2,         // x lies in the saved context
    kSavedGateUp = 4,    // gate and up do
    kContinues = 8,      // a gradient starts from the stored accumulators
    kUnfinished = 16,    // and leaves its sums there
    kLeavesChunks = 32,  // a gradient leaves through the ring of stages,
    kAddsChunks = 64,    // added to what the loader has brought there
    kFloatChunks = 128,  // FP32
    kRouter = 256,       // finishes the router gradients of its rows
    kZeroes = 512,       // a gradient without rows
};

/// A weight gradient's `row` and `valid_rows` are rows of its matrix; a bias gradient's `row` is how many
/// valid rows it sums over. `row_block` is a gradient's first.
struct BackwardTask : TileTask {
    int32_t steps;      // K steps; of a gradient: 64 rows each, the last one with a valid row
    int32_t chunks;     // of a dhidden tile, or of a gradient's
    int32_t span;       // of a gradient: index for kSpanRead; -1: nobody waits
    int32_t span_tile;  // of a cut segment's gradient: index for kAccumulator; -1: not cut
};
static_assert(sizeof(BackwardTask) <= kTaskBytes);

MOK_DEVICE bool has(const BackwardTask& task, BackwardFlag flag) {
    return (task.flags & flag) != 0;
}
MOK_DEVICE bool is_wgrad(const BackwardTask& task) {
    return task.kind >= static_cast<int32_t>(TaskKind::kWgradGate) &&
           task.kind <= static_cast<int32_t>(TaskKind::kWgradDown);
}
MOK_DEVICE bool is_bias(const BackwardTask& task) {
    return task.kind >= static_cast<int32_t>(TaskKind::kBiasGate) &&
           task.kind <= static_cast<int32_t>(TaskKind::kBiasDown);
}
/// Of a gradient.
MOK_DEVICE int32_t matrix_of(const BackwardTask& task) {
    return (task.kind - static_cast<int32_t>(TaskKind::kWgradGate)) % schedule::kNumMatrices;
}
static_assert(static_cast<int32_t>(TaskKind::kBiasGate) ==
              static_cast<int32_t>(TaskKind::kWgradGate) + schedule::kNumMatrices);

// What this kernel has in shared memory behind sm90::Shared.
inline constexpr uint32_t kSharedBytes = Shared::kBytes + 8 * kParts;
static_assert(kSharedBytes <= 232448, "an SM of sm_90 gives a block 227 KiB");

/// w of a part's rows of a dhidden tile is in its staging buffer (1).
MOK_DEVICE uint32_t weights_staged(const Shared& shared, uint32_t part) {
    return shared.base + Shared::kBytes + 8 * part;
}

/// Rows and columns of a gradient's matrix.
MOK_DEVICE int32_t gradient_rows(const MoeBackwardParams& params, const BackwardTask& task) {
    return matrix_of(task) == Matrix::kDown ? hidden_of(params) : inner_of(params, task);
}
MOK_DEVICE int32_t gradient_columns(const MoeBackwardParams& params, const BackwardTask& task) {
    return matrix_of(task) == Matrix::kDown ? inner_of(params, task) : hidden_of(params);
}

/// Stages that the task goes through: its chunks' too.
MOK_DEVICE int32_t stages_of(const BackwardTask& task) {
    int32_t stages = task.steps;
    if (is_kind(task, TaskKind::kDHidden) || has(task, kLeavesChunks)) stages += task.chunks;
    if (has(task, kContinues) && is_wgrad(task)) stages += task.chunks;
    return stages;
}

MOK_DEVICE const MoeBackwardExperts& experts_of(const MoeBackwardParams& params, const BackwardTask& task) {
    return params.experts[task.flags & kShared];
}
MOK_DEVICE const MoeBackwardRows& rows_of(const MoeBackwardParams& params, const BackwardTask& task) {
    return params.rows[task.flags & kShared];
}
MOK_DEVICE const MoeGradients& gradients_of(const MoeBackwardParams& params, const BackwardTask& task) {
    return params.gradients[task.flags & kShared];
}

/// Where the 64 rows lie that a gradient's K steps sum over, one step after the other: in the ring or at
/// their own place. No division: the loader computes nothing between a free stage and its loads, which the
/// next but one step's product waits for.
struct StepRows {
    int32_t row;
    int32_t ring_end;  // behind it the ring begins again; -1: not in the ring

    MOK_DEVICE void next() {
        row += static_cast<int32_t>(kTileK);
        if (row == ring_end) row = 0;
    }
};

MOK_DEVICE StepRows step_rows(const MoeBackwardParams& params, const BackwardTask& task, bool in_ring) {
    const schedule::ScheduleShape& shape = params.shape;
    if (!in_ring) return {task.row_block * static_cast<int32_t>(kTileM), -1};
    return {ring_row(shape, task.row_block), shape.ring_blocks * shape.block_m};
}

}  // namespace moe_backward_detail

}  // namespace mok
