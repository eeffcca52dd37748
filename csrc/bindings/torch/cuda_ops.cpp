// torch.ops.mok._plan_out and _weighted_sum_out: single kernels over CUDA tensors, for tests and benchmarks.
#if defined(MOK_WITH_CUDA)

#include <optional>

#include "csrc/bindings/torch/cuda_arguments.h"
#include "csrc/launch/plan.h"
#include "csrc/launch/weighted_sum.h"

namespace mok::bindings {

namespace {

/// ids [R, max_tokens * K] int32, num_tokens [R] int64. `scratch` is int32, zero before its first use;
/// `record` pinned int32 memory for a WaitRecord, or CUDA memory.
void plan_out(const Tensor& ids, const Tensor& num_tokens, int64_t rank, int64_t num_experts, int64_t top_k,
              int64_t pad, int64_t limit_ms, const Tensor& scratch, const Tensor& record,
              const Tensor& row_peer, const Tensor& row_slot, const Tensor& segment_begin,
              const Tensor& counts) {
    MOK_CHECK(ids.dim() == 2, "ids must be [R, max_tokens * K].");
    MOK_CHECK(top_k >= 1 && ids.size(1) % top_k == 0, "ids has ", ids.size(1),
              " slots a rank, no multiple of top_k = ", top_k, ".");
    const PlanShape shape{static_cast<int32_t>(rank),
                          static_cast<int32_t>(ids.size(0)),
                          static_cast<int32_t>(num_experts),
                          static_cast<int32_t>(top_k),
                          ids.size(1) / top_k,
                          pad};
    const CudaCall call(ids);
    constexpr int64_t kExpiredBytes = 256;
    const int64_t scratch_words = (kExpiredBytes + launch::plan_scratch_bytes(shape)) / 4;
    const int64_t rows = worst_case_rows(shape);
    const int64_t experts = shape.num_local_experts();
    launch::PlanInputs inputs{};
    inputs.ids = cuda_data(ids, "ids", ScalarType::Int, 0);
    inputs.ids_stride = ids.size(1) * 4;
    inputs.num_tokens = cuda_data(num_tokens, "num_tokens", ScalarType::Long, shape.num_ranks);
    inputs.tokens_stride = 8;
    launch::PlanOutputs outputs{};
    outputs.row_peer = cuda_data<int32_t>(row_peer, "row_peer", ScalarType::Int, rows);
    outputs.row_slot = cuda_data<int32_t>(row_slot, "row_slot", ScalarType::Int, rows);
    outputs.segment_begin = cuda_data<int64_t>(segment_begin, "segment_begin", ScalarType::Long, experts + 1);
    outputs.counts = cuda_data<int64_t>(counts, "counts", ScalarType::Long, experts);
    char* memory = cuda_data<char>(scratch, "scratch", ScalarType::Int, scratch_words);
    MOK_CHECK(record.numel() * 4 >= static_cast<int64_t>(sizeof(ptx::WaitRecord)), "record is too small.");
    const ptx::WaitLimits limits{static_cast<uint64_t>(limit_ms) * 1000000,
                                 reinterpret_cast<uint32_t*>(memory),
                                 static_cast<ptx::WaitRecord*>(record.data_ptr()), shape.rank};
    launch::launch_plan(shape, inputs, outputs, memory + kExpiredBytes, limits, call.stream());
}

const void* rows_data(const Tensor& tensor, const char* name, ScalarType dtype, int64_t rows,
                      int64_t hidden) {
    MOK_CHECK(tensor.dim() == 2 && tensor.size(0) == rows && tensor.size(1) == hidden, name, " must be [",
              rows, ", ", hidden, "].");
    return cuda_data(tensor, name, dtype, rows * hidden);
}

/// rows [T * K, H], shared_rows [T, H], out [T, H] of one dtype; ids int32 and weights float32 [T, K].
void weighted_sum_out(const Tensor& rows, const std::optional<Tensor>& shared_rows,
                      const std::optional<Tensor>& shared_weight, const Tensor& ids,
                      const std::optional<Tensor>& weights, const Tensor& out) {
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
    launch::launch_weighted_sum(sum, call.stream());
}

}  // namespace

}  // namespace mok::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(mok, library) {
    library.def(
        "_plan_out(Tensor ids, Tensor num_tokens, int rank, int num_experts, int top_k, int pad, int "
        "limit_ms, "
        "Tensor(a!) scratch, Tensor(b!) record, Tensor(c!) row_peer, Tensor(d!) row_slot, "
        "Tensor(e!) segment_begin, Tensor(f!) counts) -> ()");
    library.def(
        "_weighted_sum_out(Tensor rows, Tensor? shared_rows, Tensor? shared_weight, Tensor ids, Tensor? "
        "weights, "
        "Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mok, CUDA, library) {
    library.impl("_plan_out", TORCH_BOX(&mok::bindings::plan_out));
    library.impl("_weighted_sum_out", TORCH_BOX(&mok::bindings::weighted_sum_out));
}

#endif  // MOK_WITH_CUDA
