#include "csrc/bindings/torch/gradients.h"

#include "csrc/layout/check.h"

namespace mok::bindings {

namespace {

// Tensors of `gradients_out`, in this order.
enum GradientIndex {
    kDx,
    kDweights,
    kDshared,
    kRoutedFirst,
    kSharedFirst = kRoutedFirst + 6,
    kNumGradients = 12
};

/// A gradient is of its parameter's dtype, or FP32: a main_grad.
DType gradient_dtype(const Tensor& tensor, const char* name, DType of_parameter) {
    const DType dtype = compute_dtype(tensor, name);
    MOK_CHECK(dtype == of_parameter || dtype == DType::kFloat32, name,
              " is bfloat16 but the parameter is float32: pass a float32 gradient.");
    return dtype;
}

cpu::Gradient gradient(const Tensor& tensor, const char* name, const cpu::Matrix& weight, int64_t experts,
                       int64_t rows, int64_t columns, bool shared) {
    const DType dtype = gradient_dtype(tensor, name, weight.dtype);
    void* data = shared ? checked_output(tensor, name, {rows, columns}, dtype)
                        : checked_output(tensor, name, {experts, rows, columns}, dtype);
    return cpu::Gradient{data, dtype, rows * columns, columns};
}

cpu::ExpertGradients expert_gradients(const std::vector<Tensor>& tensors, int first, int64_t mask,
                                      int64_t first_bit, const cpu::ExpertWeights& weights, int64_t experts,
                                      int64_t hidden, int64_t intermediate, bool shared) {
    cpu::ExpertGradients result;
    const auto wanted = [&](int index) { return (mask & (first_bit << index)) != 0; };
    if (wanted(0)) {
        result.gate =
            gradient(tensors[first], "dw_gate", weights.gate, experts, intermediate, hidden, shared);
    }
    if (wanted(1)) {
        result.up = gradient(tensors[first + 1], "dw_up", weights.up, experts, intermediate, hidden, shared);
    }
    if (wanted(2)) {
        result.down =
            gradient(tensors[first + 2], "dw_down", weights.down, experts, hidden, intermediate, shared);
    }
    const auto bias = [&](int index, const char* name, const cpu::Bias& of,
                          int64_t columns) -> cpu::Gradient {
        if (shared || !wanted(index)) return {};
        MOK_CHECK(of.data != nullptr, name, " was asked for, but there is no such bias.");
        const Tensor& tensor = tensors[first + index];
        const DType dtype = gradient_dtype(tensor, name, of.dtype);
        return {checked_output(tensor, name, {experts, columns}, dtype), dtype, columns, columns};
    };
    result.b_gate = bias(3, "db_gate", weights.b_gate, intermediate);
    result.b_up = bias(4, "db_up", weights.b_up, intermediate);
    result.b_down = bias(5, "db_down", weights.b_down, hidden);
    return result;
}

}  // namespace

cpu::BackwardOutputs backward_outputs(const cpu::LayerInputs& inputs, int64_t num_local_experts,
                                      int64_t gradients, const std::vector<Tensor>& tensors) {
    const cpu::LayerShape& shape = inputs.shape;
    MOK_CHECK(tensors.size() == kNumGradients, "gradients_out must hold ", static_cast<int>(kNumGradients),
              " tensors, got ", tensors.size(), ".");
    MOK_CHECK(shape.shared_intermediate > 0 || (gradients & (cpu::kAnyShared | cpu::kGradSharedWeight)) == 0,
              "gradients of the shared expert were asked for, but there is none.");
    cpu::BackwardOutputs outputs;
    if (gradients & cpu::kGradX) {
        outputs.dx = checked_output(tensors[kDx], "dx", {shape.num_tokens, shape.hidden}, shape.compute);
    }
    if (gradients & cpu::kGradWeights) {
        outputs.dweights = static_cast<float*>(checked_output(
            tensors[kDweights], "dtopk_weights", {shape.num_tokens, shape.top_k}, DType::kFloat32));
    }
    if (gradients & cpu::kGradSharedWeight) {
        outputs.dshared_weight = static_cast<float*>(
            checked_output(tensors[kDshared], "dshared_weight", {shape.num_tokens}, DType::kFloat32));
    }
    outputs.routed = expert_gradients(tensors, kRoutedFirst, gradients, cpu::kGradRouted, inputs.routed,
                                      num_local_experts, shape.hidden, shape.intermediate, false);
    outputs.shared = expert_gradients(tensors, kSharedFirst, gradients, cpu::kGradShared, inputs.shared, 1,
                                      shape.hidden, shape.shared_intermediate, true);
    return outputs;
}

}  // namespace mok::bindings
