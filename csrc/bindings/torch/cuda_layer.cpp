// torch.ops.mok.moe_forward_out and moe_recompute_out over CUDA tensors: the megakernel of sm_90a.
#if defined(MOK_WITH_SM90)

#include <cstring>

#include "csrc/bindings/torch/arguments.h"
#include "csrc/bindings/torch/cuda_arguments.h"
#include "csrc/bindings/torch/op_errors.h"
#include "csrc/launch/device_forward.h"
#include "csrc/launch/device_workspace.h"
#include "csrc/layout/check.h"
#include "csrc/symm/registry.h"

namespace mok::bindings {

namespace {

constexpr int64_t kElementBytes = 2, kAlign = 16;

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

/// All of a forward call but `out`.
launch::DeviceForward device_call(CallKind kind, const Workspace& workspace, const cpu::LayerInputs& inputs,
                                  int64_t gradients, const cpu::SavedContext& saved) {
    const cpu::LayerShape& shape = inputs.shape;
    check_bfloat16(shape.compute, "x");
    MOK_CHECK(shape.num_local_experts * workspace.num_ranks() == shape.num_experts,
              "num_experts = ", shape.num_experts, ", but w_gate has ", shape.num_local_experts,
              " experts on each of ", workspace.num_ranks(), " rank(s): it must be their product.");
    const int64_t experts = shape.num_local_experts, h = shape.hidden, i = shape.intermediate,
                  j = shape.shared_intermediate;
    launch::DeviceForward call{};
    call.header = call_header(kind, inputs, gradients);
    call.tensors.topk_ids = inputs.topk_ids;
    call.tensors.ids_are_int64 = inputs.ids_are_int64;
    if (shape.num_tokens > 0) call.tensors.x = {inputs.x, inputs.x_row_stride * kElementBytes};
    call.topk_weights = inputs.topk_weights;
    call.routed.gate = weight_view(inputs.routed.gate, "w_gate", experts, i, h);
    call.routed.up = weight_view(inputs.routed.up, "w_up", experts, i, h);
    call.routed.down = weight_view(inputs.routed.down, "w_down", experts, h, i);
    call.routed.b_gate = bias_view(inputs.routed.b_gate, "b_gate");
    call.routed.b_up = bias_view(inputs.routed.b_up, "b_up");
    call.routed.b_down = bias_view(inputs.routed.b_down, "b_down");
    call.shared.gate = weight_view(inputs.shared.gate, "shared gate", 1, j, h);
    call.shared.up = weight_view(inputs.shared.up, "shared up", 1, j, h);
    call.shared.down = weight_view(inputs.shared.down, "shared down", 1, h, j);
    call.shared_weight = inputs.shared_weight;
    call.limit = shape.activation.limit;
    call.saved_x = saved.x;
    call.saved_gate = saved.gate;
    call.saved_up = saved.up;
    call.save_rows = saved.rows;
    call.saved_shared_gate = saved.shared_gate;
    call.saved_shared_up = saved.shared_up;
    return call;
}

/// What `make` returns, once all arguments are checked; the peers hear why if they do not fit.
template <typename Make>
auto checked(Workspace& workspace, void* stream, const Make& make) {
    return telling_peers(
        [&](const char* reason) { launch::abort_device_workspace(workspace, reason, stream); }, make);
}

void moe_forward_out(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
                     const Tensor& w_gate, const Tensor& w_up, const Tensor& w_down,
                     const std::optional<Tensor>& b_gate, const std::optional<Tensor>& b_up,
                     const std::optional<Tensor>& b_down, const std::optional<Tensor>& shared_gate,
                     const std::optional<Tensor>& shared_up, const std::optional<Tensor>& shared_down,
                     const std::optional<Tensor>& shared_weight, std::string workspace, int64_t num_experts,
                     int64_t max_tokens, int64_t ring_rows, std::string activation,
                     std::optional<double> swiglu_limit, std::string save, int64_t gradients,
                     const Tensor& out, std::vector<Tensor> saved) {
    run_op([&] {
        const std::shared_ptr<Workspace> owner = device_workspace(workspace, x);
        const CudaCall current(x);
        const launch::DeviceForward call = checked(*owner, current.stream(), [&] {
            const cpu::LayerInputs inputs =
                layer_inputs({x, topk_ids, topk_weights, w_gate, w_up, w_down, b_gate, b_up, b_down,
                              shared_gate, shared_up, shared_down, shared_weight, num_experts, max_tokens,
                              ring_rows, activation, swiglu_limit, save});
            check_device(out, "out", x);
            check_devices(saved, "saved", x);
            const cpu::LayerShape& shape = inputs.shape;
            launch::DeviceForward result =
                device_call(CallKind::kForward, *owner, inputs, gradients, saved_context(saved, shape));
            result.out = checked_output(out, "out", {shape.num_tokens, shape.hidden}, shape.compute);
            result.out_stride = shape.hidden * kElementBytes;
            MOK_CHECK(is_aligned(result.out, result.out_stride), "out must begin at a multiple of ", kAlign,
                      " bytes.");
            return result;
        });
        launch::device_forward(*owner, call, current.stream());
    });
}

void moe_recompute_out(const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
                       const Tensor& w_gate, const Tensor& w_up, const Tensor& w_down,
                       const std::optional<Tensor>& b_gate, const std::optional<Tensor>& b_up,
                       const std::optional<Tensor>& b_down, const std::optional<Tensor>& shared_gate,
                       const std::optional<Tensor>& shared_up, const std::optional<Tensor>& shared_down,
                       const std::optional<Tensor>& shared_weight, std::string workspace, int64_t num_experts,
                       int64_t max_tokens, int64_t ring_rows, std::string activation,
                       std::optional<double> swiglu_limit, std::string save, int64_t gradients,
                       std::vector<Tensor> saved) {
    run_op([&] {
        const std::shared_ptr<Workspace> owner = device_workspace(workspace, x);
        const CudaCall current(x);
        const launch::DeviceForward call = checked(*owner, current.stream(), [&] {
            const cpu::LayerInputs inputs =
                layer_inputs({x, topk_ids, topk_weights, w_gate, w_up, w_down, b_gate, b_up, b_down,
                              shared_gate, shared_up, shared_down, shared_weight, num_experts, max_tokens,
                              ring_rows, activation, swiglu_limit, save});
            check_devices(saved, "saved", x);
            return device_call(CallKind::kRecompute, *owner, inputs, gradients,
                               saved_context(saved, inputs.shape));
        });
        launch::device_forward(*owner, call, current.stream());
    });
}

}  // namespace

}  // namespace mok::bindings

STABLE_TORCH_LIBRARY_IMPL(mok, CUDA, library) {
    library.impl("moe_forward_out", TORCH_BOX(&mok::bindings::moe_forward_out));
    library.impl("moe_recompute_out", TORCH_BOX(&mok::bindings::moe_recompute_out));
}

#endif  // MOK_WITH_SM90
