// torch.ops.mok.moe_backward_out over CUDA tensors: the megakernel of sm_90a.
#if defined(MOK_WITH_SM90)

#include "csrc/bindings/torch/cuda_arguments.h"
#include "csrc/bindings/torch/cuda_views.h"
#include "csrc/bindings/torch/gradients.h"
#include "csrc/launch/device_backward.h"
#include "csrc/layout/check.h"

namespace mok::bindings {

namespace {

launch::GradientView gradient_view(const cpu::Gradient& gradient) {
    const int64_t bytes = dtype_bytes(gradient.dtype);
    return {gradient.data, gradient.dtype == DType::kFloat32, gradient.expert_stride * bytes,
            gradient.row_stride * bytes};
}

launch::MoeGradientViews gradient_views(const cpu::ExpertGradients& gradients) {
    return {
        {gradient_view(gradients.gate), gradient_view(gradients.up), gradient_view(gradients.down)},
        {gradient_view(gradients.b_gate), gradient_view(gradients.b_up), gradient_view(gradients.b_down)}};
}

void check_aligned(const launch::MoeGradientViews& views, const char* of) {
    const auto check = [&](const launch::GradientView& view) {
        MOK_CHECK(is_aligned(view.data, view.row_stride) && is_aligned(view.data, view.expert_stride),
                  "a gradient of the ", of, " is not aligned: on a GPU it must begin at a multiple of ",
                  kAlign, " bytes.");
    };
    for (const launch::GradientView& view : views.weights) check(view);
    for (const launch::GradientView& view : views.biases) check(view);
}

void moe_backward_out(const Tensor& dout, const Tensor& x, const Tensor& topk_ids, const Tensor& topk_weights,
                      const Tensor& w_gate, const Tensor& w_up, const Tensor& w_down,
                      const std::optional<Tensor>& b_gate, const std::optional<Tensor>& b_up,
                      const std::optional<Tensor>& b_down, const std::optional<Tensor>& shared_gate,
                      const std::optional<Tensor>& shared_up, const std::optional<Tensor>& shared_down,
                      const std::optional<Tensor>& shared_weight, std::vector<Tensor> saved,
                      std::string workspace, int64_t num_experts, int64_t max_tokens, int64_t ring_rows,
                      std::string activation, std::optional<double> swiglu_limit, std::string save,
                      int64_t gradients, bool accumulate, std::vector<Tensor> gradients_out) {
    run_op([&] {
        const std::shared_ptr<Workspace> owner = device_workspace(workspace, x);
        const CudaCall current(x);
        auto run = checked(*owner, current.stream(), [&] {
            const cpu::LayerInputs inputs =
                layer_inputs({x, topk_ids, topk_weights, w_gate, w_up, w_down, b_gate, b_up, b_down,
                              shared_gate, shared_up, shared_down, shared_weight, num_experts, max_tokens,
                              ring_rows, activation, swiglu_limit, save});
            const cpu::LayerShape& shape = inputs.shape;
            check_device(dout, "grad_output", x);
            check_devices(saved, "saved", x);
            check_devices(gradients_out, "gradients_out", x);
            check_for_kernels(*owner, inputs);
            const int64_t dout_stride =
                checked_rows(dout, "grad_output", shape.num_tokens, shape.hidden, shape.compute);
            const cpu::BackwardOutputs outputs =
                backward_outputs(inputs, shape.num_local_experts, gradients, gradients_out);
            const cpu::SavedContext context = saved_context(saved, shape);
            launch::DeviceBackward result{};
            result.header = call_header(CallKind::kBackward, inputs, gradients);
            result.tensors.topk_ids = inputs.topk_ids;
            result.tensors.ids_are_int64 = inputs.ids_are_int64;
            if (shape.num_tokens > 0) {
                result.tensors.x = {inputs.x, inputs.x_row_stride * kElementBytes};
                result.tensors.dout = {dout.data_ptr(), dout_stride * kElementBytes};
            }
            result.topk_weights = inputs.topk_weights;
            result.routed = routed_views(inputs);
            result.shared = shared_views(inputs);
            result.shared_weight = inputs.shared_weight;
            result.saved = {context.x,    context.gate,        context.up,
                            context.rows, context.shared_gate, context.shared_up};
            result.limit = shape.activation.limit;
            result.dx = outputs.dx;
            result.dx_stride = shape.hidden * kElementBytes;
            MOK_CHECK(is_aligned(result.dx, result.dx_stride), "dx must begin at a multiple of ", kAlign,
                      " bytes.");
            result.topk_weight_grads = outputs.dweights;
            result.shared_weight_grads = outputs.dshared_weight;
            result.routed_gradients = gradient_views(outputs.routed);
            result.shared_gradients = gradient_views(outputs.shared);
            check_aligned(result.routed_gradients, "routed experts");
            check_aligned(result.shared_gradients, "shared expert");
            result.accumulate = accumulate;
            return launch::DeviceBackwardRun(*owner, result, current.stream());
        });
        run.launch();
    });
}

}  // namespace

}  // namespace mok::bindings

STABLE_TORCH_LIBRARY_IMPL(mok, CUDA, library) {
    library.impl("moe_backward_out", TORCH_BOX(&mok::bindings::moe_backward_out));
}

#endif  // MOK_WITH_SM90
