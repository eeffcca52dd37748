// torch.ops.mok.*_out: the executor behind LibTorch's stable ABI. They write into tensors they are given; the
// functional ops with fakes and autograd are made of them in mok/ops.py.
#include "csrc/bindings/torch/arguments.h"
#include "csrc/bindings/torch/forward_results.h"
#include "csrc/bindings/torch/gradients.h"
#include "csrc/bindings/torch/op_errors.h"
#include "csrc/cpu/call.h"
#include "csrc/layout/check.h"
#include "csrc/symm/registry.h"

namespace mok::bindings {

namespace {

/// The workspace, which must be in host memory.
std::shared_ptr<Workspace> host_workspace(const std::string& name) {
    std::shared_ptr<Workspace> workspace = find_workspace(name);
    MOK_CHECK(!workspace->is_device(), "workspace '", name,
              "' is on a GPU but x is on the CPU: use a workspace that was declared for the CPU.");
    return workspace;
}

/// What `make` returns, once all arguments are checked.
template <typename Make>
auto checked(Workspace& workspace, const Make& make) {
    return telling_peers([&](const char* reason) { abort_workspace(workspace, reason); }, make);
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
        const std::shared_ptr<Workspace> owner = host_workspace(workspace);
        struct Call {
            cpu::LayerInputs inputs;
            cpu::SavedContext context;
            void* out;
        };
        const Call call = checked(*owner, [&] {
            const cpu::LayerInputs inputs =
                layer_inputs({x, topk_ids, topk_weights, w_gate, w_up, w_down, b_gate, b_up, b_down,
                              shared_gate, shared_up, shared_down, shared_weight, num_experts, max_tokens,
                              ring_rows, activation, swiglu_limit, save});
            const cpu::LayerShape& shape = inputs.shape;
            check_device(out, "out", x);
            check_devices(saved, "saved", x);
            return Call{inputs, saved_context(saved, shape),
                        checked_output(out, "out", {shape.num_tokens, shape.hidden}, shape.compute)};
        });
        cpu::run_forward(*owner, torch_threads(), call.inputs, gradients, call.out, call.context);
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
            std::shared_ptr<Workspace> owner;
            cpu::LayerInputs inputs;
            ForwardResults results;
            cpu::SavedContext context;
        };
        const Call call = refusing([&] {
            const OpArguments args{x,         topk_ids,    topk_weights,  w_gate,      w_up,
                                   w_down,    b_gate,      b_up,          b_down,      shared_gate,
                                   shared_up, shared_down, shared_weight, num_experts, max_tokens,
                                   ring_rows, activation,  swiglu_limit,  save};
            std::shared_ptr<Workspace> owner = host_workspace(workspace);
            const cpu::LayerInputs inputs = layer_inputs(args);
            check_call_sizes(inputs.shape);
            ForwardResults results = empty_forward(args, {x_rows, gate_up_rows, shared_rows});
            const cpu::SavedContext context = saved_context(results.saved, inputs.shape);
            return Call{std::move(owner), inputs, std::move(results), context};
        });
        const Tensor& out = call.results.out;
        cpu::run_forward(*call.owner, torch_threads(), call.inputs, gradients,
                         out.numel() == 0 ? nullptr : out.data_ptr(), call.context);
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
        const std::shared_ptr<Workspace> owner = host_workspace(workspace);
        struct Call {
            cpu::LayerInputs inputs;
            cpu::SavedContext context;
        };
        const Call call = checked(*owner, [&] {
            const cpu::LayerInputs inputs =
                layer_inputs({x, topk_ids, topk_weights, w_gate, w_up, w_down, b_gate, b_up, b_down,
                              shared_gate, shared_up, shared_down, shared_weight, num_experts, max_tokens,
                              ring_rows, activation, swiglu_limit, save});
            check_devices(saved, "saved", x);
            return Call{inputs, saved_context(saved, inputs.shape)};
        });
        cpu::run_recompute(*owner, torch_threads(), call.inputs, gradients, call.context);
    });
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
        const std::shared_ptr<Workspace> owner = host_workspace(workspace);
        struct Call {
            cpu::LayerInputs inputs;
            cpu::SavedContext context;
            int64_t dout_stride;
            cpu::BackwardOutputs outputs;
        };
        const Call call = checked(*owner, [&] {
            const cpu::LayerInputs inputs =
                layer_inputs({x, topk_ids, topk_weights, w_gate, w_up, w_down, b_gate, b_up, b_down,
                              shared_gate, shared_up, shared_down, shared_weight, num_experts, max_tokens,
                              ring_rows, activation, swiglu_limit, save});
            const cpu::LayerShape& shape = inputs.shape;
            check_device(dout, "grad_output", x);
            check_devices(saved, "saved", x);
            check_devices(gradients_out, "gradients_out", x);
            Call result{inputs, saved_context(saved, shape),
                        checked_rows(dout, "grad_output", shape.num_tokens, shape.hidden, shape.compute),
                        backward_outputs(inputs, w_gate.size(0), gradients, gradients_out)};
            result.outputs.accumulate = accumulate;
            return result;
        });
        cpu::run_backward(*owner, torch_threads(), call.inputs, dout.data_ptr(), call.dout_stride, gradients,
                          call.context, call.outputs);
    });
}

}  // namespace

}  // namespace mok::bindings

#define MOK_LAYER_TENSORS                                                                         \
    "Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w_gate, Tensor w_up, Tensor w_down, " \
    "Tensor? b_gate, Tensor? b_up, Tensor? b_down, Tensor? shared_gate, Tensor? shared_up, "      \
    "Tensor? shared_down, Tensor? shared_weight"
#define MOK_LAYER_SETTINGS                                                                         \
    "str workspace, int num_experts, SymInt max_tokens, SymInt ring_rows, str activation, float? " \
    "swiglu_limit, "                                                                               \
    "str save, int gradients"

STABLE_TORCH_LIBRARY_FRAGMENT(mok, library) {
    // moe_forward for tensors that are looked at here only; the last three are ContextRows.
    library.def("_moe_forward(" MOK_LAYER_TENSORS ", " MOK_LAYER_SETTINGS
                ", int x_rows, int gate_up_rows, int shared_rows) -> "
                "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
    library.def("moe_forward_out(" MOK_LAYER_TENSORS ", " MOK_LAYER_SETTINGS
                ", Tensor(a!) out, Tensor(b!)[] saved) -> ()");
    library.def("moe_recompute_out(" MOK_LAYER_TENSORS ", " MOK_LAYER_SETTINGS ", Tensor(a!)[] saved) -> ()");
    library.def("moe_backward_out(Tensor grad_output, " MOK_LAYER_TENSORS
                ", Tensor[] saved, " MOK_LAYER_SETTINGS
                ", bool accumulate, Tensor(a!)[] gradients_out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mok, CPU, library) {
    library.impl("_moe_forward", TORCH_BOX(&mok::bindings::moe_forward));
    library.impl("moe_forward_out", TORCH_BOX(&mok::bindings::moe_forward_out));
    library.impl("moe_recompute_out", TORCH_BOX(&mok::bindings::moe_recompute_out));
    library.impl("moe_backward_out", TORCH_BOX(&mok::bindings::moe_backward_out));
}
