#if defined(MOK_WITH_SM90)

#include "csrc/bindings/torch/cuda_fit.h"

#include <vector>

#include "csrc/bindings/torch/cuda_views.h"

namespace mok::bindings {

namespace {

using torch::headeronly::ScalarType;

bool has_aligned_rows(const Tensor& tensor) {
    const int64_t dims = tensor.dim(), bytes = static_cast<int64_t>(tensor.element_size());
    if (!is_aligned(tensor.data_ptr(), 0)) return false;
    if (dims <= 2 && (dims == 0 || tensor.size(0) <= 1)) return true;  // one row has no stride
    for (int64_t dim = 0; dim + 1 < dims; ++dim) {
        if (!is_aligned(nullptr, tensor.stride(dim) * bytes)) return false;
    }
    return true;
}

Tensor contiguous_bfloat16(const Tensor& tensor) {
    std::vector<int64_t> sizes;
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) sizes.push_back(tensor.size(dim));
    Tensor copy = torch::stable::new_empty(tensor, {sizes.data(), sizes.size()}, ScalarType::BFloat16);
    torch::stable::copy_(copy, tensor);
    return copy;
}

void fit(const Tensor& tensor, std::optional<Tensor>& copy) {
    const ScalarType type = tensor.scalar_type();
    const bool is_misaligned = type == ScalarType::BFloat16 && !has_aligned_rows(tensor);
    if (type == ScalarType::Float || is_misaligned) copy = contiguous_bfloat16(tensor);
}

void fit(const std::optional<Tensor>& tensor, std::optional<Tensor>& copy) {
    if (!tensor) return;
    fit(*tensor, copy);
    if (!copy) copy = *tensor;
}

const Tensor& either(const std::optional<Tensor>& copy, const Tensor& tensor) {
    return copy ? *copy : tensor;
}

}  // namespace

FittedTensors::FittedTensors(const OpArguments& arguments) : given_(arguments) {
    const Tensor& x = arguments.x;
    const bool is_expanded = x.dim() == 2 && x.size(0) > 1 && x.stride(0) < x.size(1);
    if (is_expanded && x.scalar_type() == ScalarType::BFloat16) x_ = contiguous_bfloat16(x);
    fit(arguments.w_gate, w_gate_);
    fit(arguments.w_up, w_up_);
    fit(arguments.w_down, w_down_);
    fit(arguments.b_gate, b_gate_);
    fit(arguments.b_up, b_up_);
    fit(arguments.b_down, b_down_);
    fit(arguments.shared_gate, shared_gate_);
    fit(arguments.shared_up, shared_up_);
    fit(arguments.shared_down, shared_down_);
}

OpArguments FittedTensors::arguments() const {
    const OpArguments& from = given_;
    return {either(x_, from.x),
            from.topk_ids,
            from.topk_weights,
            either(w_gate_, from.w_gate),
            either(w_up_, from.w_up),
            either(w_down_, from.w_down),
            b_gate_,
            b_up_,
            b_down_,
            shared_gate_,
            shared_up_,
            shared_down_,
            from.shared_weight,
            from.num_experts,
            from.max_tokens,
            from.ring_rows,
            from.activation,
            from.swiglu_limit,
            from.save};
}

}  // namespace mok::bindings

#endif  // MOK_WITH_SM90
