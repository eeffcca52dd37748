// The CPU executor of a whole expert-parallel MoE layer: the executable specification of the numerics
// contract.
//
// Torch-free: raw pointers with strides in, caller-owned outputs. R ranks are processes that share a
// symmetric heap; a call is publish -> barrier -> rows of this rank's experts, chunk by chunk through the
// ring -> barrier -> combine.
#pragma once

#include <cstdint>

#include "csrc/cpu/kernels.h"
#include "csrc/cpu/threads.h"
#include "csrc/layout/call_header.h"
#include "csrc/symm/workspace.h"

namespace mok::cpu {

/// What forward keeps for backward: nothing, gate and up, or the dispatched x as well.
enum class SavePolicy : int32_t { kNone = 0, kGateUp = 1, kAll = 2 };

struct LayerShape {
    int64_t num_tokens;  // T of this rank
    int64_t max_tokens;  // the largest T any rank may pass
    int64_t top_k;
    int64_t num_experts;        // in all ranks
    int64_t num_local_experts;  // in this rank's weights
    int64_t hidden;
    int64_t intermediate;
    int64_t shared_intermediate;  // 0: no shared expert
    int64_t ring_rows;
    DType compute;
    ActivationSpec activation;
    SavePolicy save;
};

/// [experts, rows, columns], last dimension contiguous, strides in elements. data null: absent.
struct Matrix {
    const void* data = nullptr;
    DType dtype = DType::kFloat32;
    int64_t expert_stride = 0;
    int64_t row_stride = 0;
};

/// [experts, columns], last dimension contiguous.
struct Bias {
    const void* data = nullptr;
    DType dtype = DType::kFloat32;
    int64_t expert_stride = 0;
};

/// Routed: gate, up [E/R, I, H], down [E/R, H, I]. Shared: one expert of width J.
struct ExpertWeights {
    Matrix gate, up, down;
    Bias b_gate, b_up, b_down;
};

/// Contiguous gradients of the same shapes; data null: not wanted. `accumulate` adds to what is there.
struct Gradient {
    void* data = nullptr;
    DType dtype = DType::kFloat32;
    int64_t expert_stride = 0;
    int64_t row_stride = 0;
};

struct ExpertGradients {
    Gradient gate, up, down, b_gate, b_up, b_down;
};

/// First-chunk context, row r of the first chunk at row r. Null where the saving policy keeps nothing.
struct SavedContext {
    void* x = nullptr;            // [save_rows, H]
    void* gate = nullptr;         // [save_rows, I]
    void* up = nullptr;           // [save_rows, I]
    void* shared_gate = nullptr;  // [T, J]
    void* shared_up = nullptr;    // [T, J]
    int64_t rows = 0;             // save_rows
};

struct LayerInputs {
    LayerShape shape;
    const void* x = nullptr;  // [T, H]
    int64_t x_row_stride = 0;
    const void* topk_ids = nullptr;  // [T, K], contiguous
    bool ids_are_int64 = false;
    const float* topk_weights = nullptr;  // [T, K], contiguous; unused by recompute
    ExpertWeights routed;
    ExpertWeights shared;
    const float* shared_weight = nullptr;  // [T], null: 1
    bool shared_gated = false;             // shared_weight was passed (T = 0 has no data pointer)
};

struct BackwardOutputs {
    void* dx = nullptr;               // [T, H], null: not wanted
    float* dweights = nullptr;        // [T, K]
    float* dshared_weight = nullptr;  // [T]
    ExpertGradients routed;
    ExpertGradients shared;
    bool accumulate = false;  // expert gradients are added to their buffers; an idle expert's is left alone
};

/// out [T, H] and, as shape.save says, the context. `gradients` is published for the check between ranks.
void run_forward(Workspace& workspace, const ThreadPool& threads, const LayerInputs& inputs,
                 int64_t gradients, void* out, const SavedContext& saved);

/// Rebuilds the context alone, bit for bit what forward saved.
void run_recompute(Workspace& workspace, const ThreadPool& threads, const LayerInputs& inputs,
                   int64_t gradients, const SavedContext& saved);

/// `saved` is what forward with the same shape.save returned.
void run_backward(Workspace& workspace, const ThreadPool& threads, const LayerInputs& inputs,
                  const void* dout, int64_t dout_row_stride, int64_t gradients, const SavedContext& saved,
                  const BackwardOutputs& outputs);

}  // namespace mok::cpu
