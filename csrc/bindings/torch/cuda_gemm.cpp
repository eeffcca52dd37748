// torch.ops.mok._sm90_grouped_gemm_out: one kernel over CUDA tensors, for tests and benchmarks.
#if defined(MOK_WITH_SM90)

#include "csrc/bindings/torch/cuda_arguments.h"
#include "csrc/launch/sm90_bf16_grouped_gemm.h"

namespace mok::bindings {

namespace {

/// A BF16 CUDA tensor of this many dimensions with contiguous columns.
void* bf16_data(const Tensor& tensor, const char* name, int64_t dimensions) {
    MOK_CHECK(tensor.is_cuda() && tensor.scalar_type() == ScalarType::BFloat16, name,
              " must be a bfloat16 CUDA tensor.");
    MOK_CHECK(tensor.dim() == dimensions && tensor.stride(dimensions - 1) == 1, name, " must have ",
              dimensions, " dimensions, the last of stride 1.");
    return tensor.data_ptr();
}

/// y[r] = x[r] W_e^T, x [rows, K], weights [E, N, K], y [rows, N]; segment_begin [E + 1], counts [E] int64.
/// `scratch`: 256 bytes of int32, zero before its first use; `record` pinned int32 memory for a WaitRecord,
/// or CUDA memory.
void grouped_gemm_out(const Tensor& x, const Tensor& weights, const Tensor& segment_begin,
                      const Tensor& counts, int64_t limit_ms, const Tensor& scratch, const Tensor& record,
                      const Tensor& y) {
    constexpr int64_t kScratchWords = 64, kExpiredByte = 128;
    launch::GroupedGemm gemm{};
    gemm.x = bf16_data(x, "x", 2);
    gemm.weights.data = bf16_data(weights, "weights", 3);
    gemm.y = bf16_data(y, "y", 2);
    gemm.rows = x.size(0);
    gemm.weights.experts = weights.size(0);
    gemm.weights.rows = weights.size(1);
    gemm.weights.columns = weights.size(2);
    MOK_CHECK(x.size(1) == gemm.weights.columns, "x has ", x.size(1), " columns, weights ",
              gemm.weights.columns, ": they must be equal.");
    MOK_CHECK(y.size(0) == gemm.rows && y.size(1) == gemm.weights.rows, "y must be [", gemm.rows, ", ",
              gemm.weights.rows, "].");
    gemm.x_stride = 2 * x.stride(0);
    gemm.y_stride = 2 * y.stride(0);
    gemm.weights.row_stride = 2 * weights.stride(1);
    gemm.weights.expert_stride = 2 * weights.stride(0);
    gemm.segment_begin =
        cuda_data<int64_t>(segment_begin, "segment_begin", ScalarType::Long, gemm.weights.experts + 1);
    gemm.counts = cuda_data<int64_t>(counts, "counts", ScalarType::Long, gemm.weights.experts);
    const CudaCall call(x);
    char* memory = cuda_data<char>(scratch, "scratch", ScalarType::Int, kScratchWords);
    gemm.claim = reinterpret_cast<uint64_t*>(memory);
    MOK_CHECK(record.numel() * 4 >= static_cast<int64_t>(sizeof(ptx::WaitRecord)), "record is too small.");
    const ptx::WaitLimits limits{static_cast<uint64_t>(limit_ms) * 1000000,
                                 reinterpret_cast<uint32_t*>(memory + kExpiredByte),
                                 static_cast<ptx::WaitRecord*>(record.data_ptr()), 0};
    launch::launch_sm90_bf16_grouped_gemm(gemm, limits, call.stream());
}

}  // namespace

}  // namespace mok::bindings

STABLE_TORCH_LIBRARY_FRAGMENT(mok, library) {
    library.def(
        "_sm90_grouped_gemm_out(Tensor x, Tensor weights, Tensor segment_begin, Tensor counts, int limit_ms, "
        "Tensor(a!) scratch, Tensor(b!) record, Tensor(c!) y) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(mok, CUDA, library) {
    library.impl("_sm90_grouped_gemm_out", TORCH_BOX(&mok::bindings::grouped_gemm_out));
}

#endif  // MOK_WITH_SM90
