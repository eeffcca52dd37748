// torch.ops.mok._weighted_sum_out: the combine epilogue alone over CUDA tensors, for tests and benchmarks.
#if defined(MOK_WITH_CUDA)

#include <optional>

#include "csrc/bindings/torch/cuda_arguments.h"
#include "csrc/launch/weighted_sum.h"

namespace mok::bindings {

namespace {

const void* rows_data(const Tensor& tensor, const char* name, ScalarType dtype, int64_t rows,
                      int64_t hidden) {
    MOK_CHECK(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == hidden, name, " must be [",
              rows, ", ", hidden, "].");
    return cuda_data(tensor, name, dtype, rows * hidden);
}

/// rows [T * K, H], shared_rows [T, H], out [T, H] of one dtype; ids int32 and weights float32 [T, K]. With a
/// non-zero `expired` (int32 [1]) the kernel leaves at once.
void weighted_sum_out(const Tensor& rows, const std::optional<Tensor>& shared_rows,
                      const std::optional<Tensor>& shared_weight, const Tensor& ids,
                      const std::optional<Tensor>& weights, const Tensor& out,
                      const std::optional<Tensor>& expired) {
    MOK_CHECK(ids.dim() == 2 && out.dim() == 2, "ids must be [T, K] and out [T, H].");
    const ScalarType dtype = out.scalar_type();
    MOK_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Float,
              "out must be bfloat16 or float32.");
    const CudaCall call(out);
    launch::WeightedSum sum{};
    sum.dtype = dtype == ScalarType::Float ? DType::kFloat32 : DType::kBFloat16;
    sum.tokens = out.size(0);
    sum.top_k = ids.size(1);
    sum.hidden = out.size(1);
    sum.rows = rows_data(rows, "rows", dtype, sum.tokens * sum.top_k, sum.hidden);
    if (shared_rows) sum.shared_rows = rows_data(*shared_rows, "shared_rows", dtype, sum.tokens, sum.hidden);
    if (shared_weight) {
        sum.shared_weight = cuda_data<float>(*shared_weight, "shared_weight", ScalarType::Float, sum.tokens);
    }
    sum.ids = cuda_data<int32_t>(ids, "ids", ScalarType::Int, sum.tokens * sum.top_k);
    if (weights) {
        sum.weights = cuda_data<float>(*weights, "weights", ScalarType::Float, sum.tokens * sum.top_k);
    }
    sum.out = cuda_data(out, "out", dtype, 0);
    sum.rows_stride = sum.shared_stride = sum.out_stride = sum.hidden * dtype_bytes(sum.dtype);
    if (expired) sum.expired = cuda_data<uint32_t>(*expired, "expired", ScalarType::Int, 1);
    launch::launch_weighted_sum(sum, call.stream());
}

}  // namespace

}  // namespace mok::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(mok, library) {
    library.def(
        "_weighted_sum_out(Tensor rows, Tensor? shared_rows, Tensor? shared_weight, Tensor ids, Tensor? "
        "weights, "
        "Tensor(a!) out, Tensor? expired=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mok, CUDA, library) {
    library.impl("_weighted_sum_out", TORCH_BOX(&mok::bindings::weighted_sum_out));
}

#endif  // MOK_WITH_CUDA
