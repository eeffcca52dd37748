#if defined(MOK_WITH_SM90)

#include "csrc/bindings/torch/cuda_views.h"

#include <cstring>

#include "csrc/layout/check.h"

namespace mok::bindings {

namespace {

void check_bfloat16(DType dtype, const char* name) {
    MOK_CHECK(dtype == DType::kBFloat16, name,
              " is float32, but the GPU kernels take bfloat16: cast it, or use backend=\"collective\".");
}

launch::WeightView weight_view(const cpu::Matrix& matrix, const char* name, int64_t experts, int64_t rows,
                               int64_t columns) {
    if (matrix.data == nullptr) return {};
    check_bfloat16(matrix.dtype, name);
    launch::WeightView view;
    view.data = matrix.data;
    view.experts = experts;
    view.rows = rows;
    view.columns = columns;
    view.row_stride = matrix.row_stride * kElementBytes;
    // One expert may come without a stride.
    view.expert_stride = experts > 1 ? matrix.expert_stride * kElementBytes : rows * view.row_stride;
    MOK_CHECK(is_aligned(view.data, view.row_stride) && is_aligned(view.data, view.expert_stride), name,
              " is not aligned: on a GPU its address must be a multiple of 16 bytes and its strides of 8 "
              "elements; pass a contiguous copy.");
    return view;
}

launch::BiasView bias_view(const cpu::Bias& bias, const char* name) {
    if (bias.data == nullptr) return {};
    check_bfloat16(bias.dtype, name);
    return {bias.data, bias.expert_stride * kElementBytes};
}

}  // namespace

std::shared_ptr<Workspace> device_workspace(const std::string& name, const Tensor& x) {
    std::shared_ptr<Workspace> workspace = find_workspace(name);
    MOK_CHECK(workspace->is_device() && workspace->heap->device() == x.get_device_index(), "workspace '",
              name, "' is not on x's device, cuda:", x.get_device_index(),
              ": use a workspace that was declared for it.");
    return workspace;
}

bool is_aligned(const void* data, int64_t stride_bytes) {
    return reinterpret_cast<uintptr_t>(data) % kAlign == 0 && stride_bytes % kAlign == 0;
}

void check_for_kernels(const Workspace& workspace, const cpu::LayerInputs& inputs) {
    const cpu::LayerShape& shape = inputs.shape;
    check_bfloat16(shape.compute, "x");
    MOK_CHECK(shape.num_local_experts * workspace.num_ranks() == shape.num_experts,
              "num_experts = ", shape.num_experts, ", but w_gate has ", shape.num_local_experts,
              " experts on each of ", workspace.num_ranks(), " rank(s): it must be their product.");
}

launch::MoeExpertViews routed_views(const cpu::LayerInputs& inputs) {
    const cpu::LayerShape& shape = inputs.shape;
    const int64_t experts = shape.num_local_experts, h = shape.hidden, i = shape.intermediate;
    launch::MoeExpertViews views;
    views.gate = weight_view(inputs.routed.gate, "w_gate", experts, i, h);
    views.up = weight_view(inputs.routed.up, "w_up", experts, i, h);
    views.down = weight_view(inputs.routed.down, "w_down", experts, h, i);
    views.b_gate = bias_view(inputs.routed.b_gate, "b_gate");
    views.b_up = bias_view(inputs.routed.b_up, "b_up");
    views.b_down = bias_view(inputs.routed.b_down, "b_down");
    return views;
}

launch::MoeExpertViews shared_views(const cpu::LayerInputs& inputs) {
    const int64_t h = inputs.shape.hidden, j = inputs.shape.shared_intermediate;
    launch::MoeExpertViews views;
    views.gate = weight_view(inputs.shared.gate, "shared gate", 1, j, h);
    views.up = weight_view(inputs.shared.up, "shared up", 1, j, h);
    views.down = weight_view(inputs.shared.down, "shared down", 1, h, j);
    return views;
}

CallHeader call_header(CallKind kind, const cpu::LayerInputs& inputs, int64_t gradients) {
    const cpu::LayerShape& shape = inputs.shape;
    CallHeader header{};
    header.num_tokens = shape.num_tokens;
    header.kind = static_cast<int64_t>(kind);
    header.num_experts = shape.num_experts;
    header.top_k = shape.top_k;
    header.hidden = shape.hidden;
    header.intermediate = shape.intermediate;
    header.shared_intermediate = shape.shared_intermediate;
    header.dtype = static_cast<int64_t>(shape.compute);
    header.activation = static_cast<int64_t>(shape.activation.kind);
    uint32_t limit_bits;
    std::memcpy(&limit_bits, &shape.activation.limit, sizeof(limit_bits));
    header.limit_bits = limit_bits;
    header.save = static_cast<int64_t>(shape.save);
    header.ring_rows = shape.ring_rows;
    header.max_tokens = shape.max_tokens;
    header.has_bias = (inputs.routed.b_gate.data ? 1 : 0) | (inputs.routed.b_up.data ? 2 : 0) |
                      (inputs.routed.b_down.data ? 4 : 0);
    header.shared_gate = inputs.shared_gated ? 1 : 0;
    header.gradients = gradients;
    return header;
}

}  // namespace mok::bindings

#endif  // MOK_WITH_SM90
