#include "csrc/bindings/torch/forward_results.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>

namespace mok::bindings {

namespace {

Tensor empty_rows(const Tensor& x, int64_t rows, int64_t columns) {
    const std::array<int64_t, 2> sizes{rows, columns};
    if (rows > 0 && columns > 0) return torch::stable::new_empty(x, {sizes.data(), sizes.size()});
    // Without the dispatcher, which takes longer than the rest: there is no memory to allocate or to poison.
    const std::array<int64_t, 2> strides{columns > 0 ? columns : 1, 1};
    int32_t dtype = 0, device_type = 0, device_index = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device_type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &device_index));
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(2, sizes.data(), strides.data(), dtype, device_type, device_index, &handle));
    return Tensor(handle);
}

}  // namespace

ForwardResults empty_forward(const OpArguments& arguments, const ContextRows& rows) {
    const Tensor& x = arguments.x;
    const int64_t inner = arguments.w_gate.size(1);
    const int64_t shared = arguments.shared_gate ? arguments.shared_gate->size(0) : 0;
    return {empty_rows(x, x.size(0), x.size(1)),
            {empty_rows(x, rows.x, x.size(1)), empty_rows(x, rows.gate_up, inner),
             empty_rows(x, rows.gate_up, inner), empty_rows(x, rows.shared, shared),
             empty_rows(x, rows.shared, shared)}};
}

void check_call_sizes(const cpu::LayerShape& shape) {
    MOK_CHECK(shape.num_tokens <= shape.max_tokens, "x has T = ", shape.num_tokens,
              " tokens, more than max_tokens = ", shape.max_tokens,
              ": pass max_tokens = the largest T any rank will pass when the layer is made.");
    MOK_CHECK(shape.top_k >= 1 && shape.top_k <= shape.num_experts, "topk_ids has K = ", shape.top_k,
              " choices per token: K must be at least 1 and at most the number of experts (",
              shape.num_experts, ").");
}

}  // namespace mok::bindings
