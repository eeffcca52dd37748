// torch.ops.mok.moe_forward_out, moe_recompute_out and _moe_forward over CUDA tensors: the megakernel of
// sm_90a.
#if defined(MOK_WITH_SM90)

#include "csrc/bindings/torch/arguments.h"
#include "csrc/bindings/torch/cuda_arguments.h"
#include "csrc/bindings/torch/cuda_fit.h"
#include "csrc/bindings/torch/cuda_views.h"
#include "csrc/bindings/torch/forward_results.h"
#include "csrc/launch/device_forward.h"
#include "csrc/layout/check.h"

namespace mok::bindings {

namespace {

/// All of a forward call but `out`.
launch::DeviceForward device_call(CallKind kind, const Workspace& workspace, const cpu::LayerInputs& inputs,
                                  int64_t gradients, const cpu::SavedContext& saved) {
    const cpu::LayerShape& shape = inputs.shape;
    check_for_kernels(workspace, inputs);
    launch::DeviceForward call{};
    call.header = call_header(kind, inputs, gradients);
    call.tensors.topk_ids = inputs.topk_ids;
    call.tensors.ids_are_int64 = inputs.ids_are_int64;
    if (shape.num_tokens > 0) call.tensors.x = {inputs.x, inputs.x_row_stride * kElementBytes};
    call.topk_weights = inputs.topk_weights;
    call.routed = routed_views(inputs);
    call.shared = shared_views(inputs);
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

launch::DeviceForward forward_call(const Workspace& workspace, const cpu::LayerInputs& inputs,
                                   int64_t gradients, const Tensor& out, const std::vector<Tensor>& saved) {
    const cpu::LayerShape& shape = inputs.shape;
    launch::DeviceForward result =
        device_call(CallKind::kForward, workspace, inputs, gradients, saved_context(saved, shape));
    result.out = checked_output(out, "out", {shape.num_tokens, shape.hidden}, shape.compute);
    result.out_stride = shape.hidden * kElementBytes;
    MOK_CHECK(is_aligned(result.out, result.out_stride), "out must begin at a multiple of ", kAlign,
              " bytes.");
    return result;
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
        auto run = checked(*owner, current.stream(), [&] {
            const cpu::LayerInputs inputs =
                layer_inputs({x, topk_ids, topk_weights, w_gate, w_up, w_down, b_gate, b_up, b_down,
                              shared_gate, shared_up, shared_down, shared_weight, num_experts, max_tokens,
                              ring_rows, activation, swiglu_limit, save});
            check_device(out, "out", x);
            check_devices(saved, "saved", x);
            return launch::DeviceForwardRun(*owner, forward_call(*owner, inputs, gradients, out, saved),
                                            current.stream());
        });
        run.launch();
    });
}

ForwardResults::Tuple moe_forward(
    const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights, const Tensor& w_gate,
    const Tensor& w_up, const Tensor& w_down, const std::optional<Tensor>& b_gate,
    const std::optional<Tensor>& b_up, const std::optional<Tensor>& b_down,
    const std::optional<Tensor>& shared_gate, const std::optional<Tensor>& shared_up,
    const std::optional<Tensor>& shared_down, const std::optional<Tensor>& shared_weight,
    std::string workspace, int64_t num_experts, int64_t max_tokens, int64_t ring_rows, std::string activation,
    std::optional<double> swiglu_limit, std::string save, int64_t gradients, int64_t x_rows,
    int64_t gate_up_rows, int64_t shared_rows) {
    return run_op([&] {
        struct Call {
            FittedTensors fitted;  // alive until the launches below are in the stream
            ForwardResults results;
            launch::DeviceForwardRun run;
        };
        const std::shared_ptr<Workspace> owner = refusing([&] { return device_workspace(workspace, x); });
        const CudaCall current(x);
        Call call = refusing([&] {
            FittedTensors fitted({x, topk_ids, topk_weights, w_gate, w_up, w_down, b_gate, b_up, b_down,
                                  shared_gate, shared_up, shared_down, shared_weight, num_experts, max_tokens,
                                  ring_rows, activation, swiglu_limit, save});
            const OpArguments args = fitted.arguments();
            const cpu::LayerInputs inputs = layer_inputs(args);
            check_call_sizes(inputs.shape);
            ForwardResults results = empty_forward(args, {x_rows, gate_up_rows, shared_rows});
            const launch::DeviceForward forward =
                forward_call(*owner, inputs, gradients, results.out, results.saved);
            return Call{std::move(fitted), std::move(results),
                        launch::DeviceForwardRun(*owner, forward, current.stream())};
        });
        call.run.launch();
        return call.results.tuple();
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
        auto run = checked(*owner, current.stream(), [&] {
            const cpu::LayerInputs inputs =
                layer_inputs({x, topk_ids, topk_weights, w_gate, w_up, w_down, b_gate, b_up, b_down,
                              shared_gate, shared_up, shared_down, shared_weight, num_experts, max_tokens,
                              ring_rows, activation, swiglu_limit, save});
            check_devices(saved, "saved", x);
            const launch::DeviceForward call = device_call(CallKind::kRecompute, *owner, inputs, gradients,
                                                           saved_context(saved, inputs.shape));
            return launch::DeviceForwardRun(*owner, call, current.stream());
        });
        run.launch();
    });
}

}  // namespace

}  // namespace mok::bindings

STABLE_TORCH_LIBRARY_IMPL(mok, CUDA, library) {
    library.impl("_moe_forward", TORCH_BOX(&mok::bindings::moe_forward));
    library.impl("moe_forward_out", TORCH_BOX(&mok::bindings::moe_forward_out));
    library.impl("moe_recompute_out", TORCH_BOX(&mok::bindings::moe_recompute_out));
}

#endif  // MOK_WITH_SM90
