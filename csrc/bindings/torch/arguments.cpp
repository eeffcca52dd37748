#include "csrc/bindings/torch/arguments.h"

#include "csrc/layout/check.h"

namespace mok::bindings {

namespace {

using torch::headeronly::ScalarType;

std::string sizes_of(const Tensor& tensor) {
    std::string text = "[";
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) text += concat(dim ? ", " : "", tensor.size(dim));
    return text + "]";
}

std::string sizes_of(std::initializer_list<int64_t> sizes) {
    std::string text = "[";
    for (const int64_t& size : sizes) text += concat(&size == sizes.begin() ? "" : ", ", size);
    return text + "]";
}

std::string device_of(const Tensor& tensor) {
    return tensor.is_cpu() ? "the CPU" : concat("cuda:", tensor.get_device_index());
}

void check_sizes(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes) {
    bool equal = tensor.dim() == static_cast<int64_t>(sizes.size());
    int64_t dim = 0;
    for (const int64_t size : sizes) equal = equal && tensor.size(dim++) == size;
    MOK_CHECK(equal, name, " has shape ", sizes_of(tensor), ", expected ", sizes_of(sizes), ".");
}

bool rows_contiguous(const Tensor& tensor) {
    const int64_t last = tensor.dim() - 1;
    // Strides of an empty tensor mean nothing (the gradient of a sum over T = 0 tokens has zeros).
    return tensor.numel() == 0 || tensor.size(last) <= 1 || tensor.stride(last) == 1;
}

int64_t element_stride(const Tensor& tensor, int64_t dim) {
    return tensor.numel() == 0 ? 0 : tensor.stride(dim);
}

cpu::Matrix matrix(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes,
                   DType compute) {
    check_sizes(tensor, name, sizes);
    const DType dtype = compute_dtype(tensor, name);
    MOK_CHECK(dtype == compute || dtype == DType::kFloat32, name,
              " is bfloat16 but x is float32: cast the weights to float32 or x to bfloat16.");
    MOK_CHECK(rows_contiguous(tensor), name, " has a last dimension with stride ",
              tensor.stride(tensor.dim() - 1),
              ": it must be contiguous (stride 1); other dimensions may have any stride.");
    const int64_t dims = tensor.dim();
    return cpu::Matrix{tensor.data_ptr(), dtype, dims == 3 ? element_stride(tensor, 0) : 0,
                       element_stride(tensor, dims - 2)};
}

cpu::Bias bias(const std::optional<Tensor>& tensor, const char* name, int64_t experts, int64_t columns,
               DType compute) {
    if (!tensor) return {};
    check_sizes(*tensor, name, {experts, columns});
    const DType dtype = compute_dtype(*tensor, name);
    MOK_CHECK(dtype == compute || dtype == DType::kFloat32, name,
              " is bfloat16 but x is float32: cast the biases to float32 or x to bfloat16.");
    MOK_CHECK(rows_contiguous(*tensor), name, " must have a contiguous last dimension.");
    return cpu::Bias{tensor->data_ptr(), dtype, element_stride(*tensor, 0)};
}

cpu::ActivationSpec activation_spec(const std::string& activation, std::optional<double> limit) {
    MOK_CHECK(!limit || *limit > 0, "swiglu_limit = ", limit.value_or(0),
              ": must be positive, or None for no limit.");
    if (activation == "gpt_oss") return {cpu::Activation::kGptOss, static_cast<float>(limit.value_or(7.0))};
    MOK_CHECK(activation == "swiglu", "activation = '", activation, "': must be 'swiglu' or 'gpt_oss'.");
    if (!limit) return {cpu::Activation::kSwiglu, 0.0f};
    return {cpu::Activation::kSwigluLimit, static_cast<float>(*limit)};
}

cpu::SavePolicy save_policy(const std::string& save) {
    if (save == "none") return cpu::SavePolicy::kNone;
    if (save == "gate_up") return cpu::SavePolicy::kGateUp;
    MOK_CHECK(save == "all", "save = '", save, "': must be 'all', 'gate_up' or 'none'.");
    return cpu::SavePolicy::kAll;
}

void check_input_devices(const OpArguments& args) {
    check_device(args.topk_ids, "topk_ids", args.x);
    check_device(args.topk_weights, "topk_weights", args.x);
    check_device(args.w_gate, "w_gate", args.x);
    check_device(args.w_up, "w_up", args.x);
    check_device(args.w_down, "w_down", args.x);
    const auto check = [&](const std::optional<Tensor>& tensor, const char* name) {
        if (tensor) check_device(*tensor, name, args.x);
    };
    check(args.b_gate, "b_gate");
    check(args.b_up, "b_up");
    check(args.b_down, "b_down");
    check(args.shared_gate, "shared gate");
    check(args.shared_up, "shared up");
    check(args.shared_down, "shared down");
    check(args.shared_weight, "shared_weight_T");
}

void check_width(const char* name, int64_t value) {
    MOK_CHECK(value >= 8 && value % 8 == 0, name, " = ", value, ": must be a positive multiple of 8.");
}

}  // namespace

void check_device(const Tensor& tensor, const char* name, const Tensor& x) {
    MOK_CHECK(tensor.is_cpu() == x.is_cpu() && tensor.get_device_index() == x.get_device_index(), name,
              " is on ", device_of(tensor), " but x is on ", device_of(x),
              ": move all tensors of the call to one device.");
}

void check_devices(const std::vector<Tensor>& tensors, const char* name, const Tensor& x) {
    for (const Tensor& tensor : tensors) check_device(tensor, name, x);
}

DType compute_dtype(const Tensor& tensor, const char* name) {
    const ScalarType type = tensor.scalar_type();
    MOK_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, name,
              " must be float32 or bfloat16 (torch dtype number ", static_cast<int>(type), " was passed).");
    return type == ScalarType::Float ? DType::kFloat32 : DType::kBFloat16;
}

int64_t checked_rows(const Tensor& tensor, const char* name, int64_t tokens, int64_t hidden, DType dtype) {
    check_sizes(tensor, name, {tokens, hidden});
    MOK_CHECK(compute_dtype(tensor, name) == dtype, name, " must have the dtype of x.");
    MOK_CHECK(rows_contiguous(tensor), name, " must have a contiguous last dimension.");
    return tokens > 1 ? tensor.stride(0) : hidden;
}

cpu::LayerInputs layer_inputs(const OpArguments& args) {
    MOK_CHECK(args.x.dim() == 2, "x must be [T, H], got ", sizes_of(args.x), ".");
    MOK_CHECK(args.topk_ids.dim() == 2, "topk_ids must be [T, K], got ", sizes_of(args.topk_ids), ".");
    MOK_CHECK(args.w_gate.dim() == 3, "w_gate must be [E/R, I, H], got ", sizes_of(args.w_gate), ".");
    check_input_devices(args);
    cpu::LayerInputs inputs;
    cpu::LayerShape& shape = inputs.shape;
    const int64_t local_experts = args.w_gate.size(0);
    shape.num_tokens = args.x.size(0);
    shape.max_tokens = args.max_tokens;
    shape.top_k = args.topk_ids.size(1);
    shape.num_experts = args.num_experts;
    shape.num_local_experts = local_experts;
    shape.hidden = args.x.size(1);
    shape.intermediate = args.w_gate.size(1);
    shape.shared_intermediate = args.shared_gate ? args.shared_gate->size(0) : 0;
    shape.ring_rows = args.ring_rows;
    shape.compute = compute_dtype(args.x, "x");
    shape.activation = activation_spec(args.activation, args.swiglu_limit);
    shape.save = save_policy(args.save);
    check_width("hidden_size", shape.hidden);
    check_width("intermediate_size", shape.intermediate);
    MOK_CHECK(local_experts >= 1 && shape.num_experts % local_experts == 0,
              "num_experts = ", shape.num_experts, " is not a multiple of the ", local_experts,
              " experts in w_gate.");

    inputs.x_row_stride = checked_rows(args.x, "x", shape.num_tokens, shape.hidden, shape.compute);
    inputs.x = args.x.data_ptr();

    check_sizes(args.topk_ids, "topk_ids", {shape.num_tokens, shape.top_k});
    const ScalarType ids = args.topk_ids.scalar_type();
    MOK_CHECK(ids == ScalarType::Int || ids == ScalarType::Long, "topk_ids must be int32 or int64.");
    MOK_CHECK(args.topk_ids.is_contiguous(), "topk_ids must be contiguous.");
    inputs.topk_ids = args.topk_ids.data_ptr();
    inputs.ids_are_int64 = ids == ScalarType::Long;

    check_sizes(args.topk_weights, "topk_weights", {shape.num_tokens, shape.top_k});
    MOK_CHECK(args.topk_weights.scalar_type() == ScalarType::Float && args.topk_weights.is_contiguous(),
              "topk_weights must be contiguous float32.");
    inputs.topk_weights = static_cast<const float*>(args.topk_weights.data_ptr());

    const int64_t e = local_experts, h = shape.hidden, i = shape.intermediate, j = shape.shared_intermediate;
    inputs.routed.gate = matrix(args.w_gate, "w_gate", {e, i, h}, shape.compute);
    inputs.routed.up = matrix(args.w_up, "w_up", {e, i, h}, shape.compute);
    inputs.routed.down = matrix(args.w_down, "w_down", {e, h, i}, shape.compute);
    inputs.routed.b_gate = bias(args.b_gate, "b_gate", e, i, shape.compute);
    inputs.routed.b_up = bias(args.b_up, "b_up", e, i, shape.compute);
    inputs.routed.b_down = bias(args.b_down, "b_down", e, h, shape.compute);

    MOK_CHECK(args.shared_gate.has_value() == args.shared_up.has_value() &&
                  args.shared_gate.has_value() == args.shared_down.has_value(),
              "the shared expert needs all of gate, up and down, or none.");
    MOK_CHECK(!args.shared_weight || args.shared_gate, "shared_weight_T was passed without a shared expert.");
    if (args.shared_gate) {
        check_width("shared_intermediate_size", j);
        inputs.shared.gate = matrix(*args.shared_gate, "shared gate", {j, h}, shape.compute);
        inputs.shared.up = matrix(*args.shared_up, "shared up", {j, h}, shape.compute);
        inputs.shared.down = matrix(*args.shared_down, "shared down", {h, j}, shape.compute);
    }
    if (args.shared_weight) {
        check_sizes(*args.shared_weight, "shared_weight_T", {shape.num_tokens});
        MOK_CHECK(
            args.shared_weight->scalar_type() == ScalarType::Float && args.shared_weight->is_contiguous(),
            "shared_weight_T must be contiguous float32.");
        inputs.shared_weight = static_cast<const float*>(args.shared_weight->data_ptr());
        inputs.shared_gated = true;
    }
    return inputs;
}

void* checked_output(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes,
                     DType dtype) {
    check_sizes(tensor, name, sizes);
    MOK_CHECK(compute_dtype(tensor, name) == dtype, name, " has the wrong dtype.");
    MOK_CHECK(tensor.is_contiguous(), name, " must be contiguous.");
    return tensor.numel() == 0 ? nullptr : tensor.data_ptr();
}

cpu::SavedContext saved_context(const std::vector<Tensor>& saved, const cpu::LayerShape& shape) {
    MOK_CHECK(saved.size() == 5, "saved must hold x_rows, gate, up, shared_gate and shared_up, got ",
              saved.size(), " tensors.");
    cpu::SavedContext context;
    if (shape.save == cpu::SavePolicy::kNone) return context;
    context.rows = saved[1].size(0);
    context.gate = checked_output(saved[1], "saved gate", {context.rows, shape.intermediate}, shape.compute);
    context.up = checked_output(saved[2], "saved up", {context.rows, shape.intermediate}, shape.compute);
    if (shape.save == cpu::SavePolicy::kAll) {
        context.x = checked_output(saved[0], "saved x_rows", {context.rows, shape.hidden}, shape.compute);
    }
    if (shape.shared_intermediate > 0) {
        const int64_t tokens = shape.num_tokens, width = shape.shared_intermediate;
        context.shared_gate = checked_output(saved[3], "saved shared_gate", {tokens, width}, shape.compute);
        context.shared_up = checked_output(saved[4], "saved shared_up", {tokens, width}, shape.compute);
    }
    return context;
}

cpu::ThreadPool torch_threads() {
    cpu::ThreadPool pool;
    pool.count = torch::stable::get_num_threads();
    pool.launch = [](int64_t count, void* context, void (*body)(void*, int64_t)) {
        torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
            for (int64_t worker = begin; worker < end; ++worker) body(context, worker);
        });
    };
    return pool;
}

}  // namespace mok::bindings
