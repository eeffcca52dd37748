#include <algorithm>
#include <limits>

#include "csrc/kernels/weighted_sum.cuh"
#include "csrc/launch/launch.cuh"
#include "csrc/launch/weighted_sum.h"
#include "csrc/layout/check.h"

namespace mok::launch {

void load_weighted_sum() {
    load_kernel("loading mok's weighted sum", weighted_sum_kernel<bf16>);
    load_kernel("loading mok's weighted sum", weighted_sum_kernel<float>);
}

void launch_weighted_sum(const WeightedSum& sum, void* stream) {
    MOK_CHECK(sum.hidden >= 8 && sum.hidden % 8 == 0, "hidden_size = ", sum.hidden,
              ": must be a positive multiple of 8.");
    MOK_CHECK(sum.top_k >= 1, "top_k = ", sum.top_k, ": must be at least 1.");
    const int64_t pieces = ceil_div<int64_t>(sum.hidden * dtype_bytes(sum.dtype), kPieceBytes);
    const int64_t limit = std::numeric_limits<int32_t>::max();
    MOK_CHECK(sum.tokens >= 0 && sum.tokens <= limit / pieces && sum.top_k <= limit, "T = ", sum.tokens,
              " with hidden_size = ", sum.hidden, ": too many tokens for one call; pass fewer.");
    if (sum.tokens == 0) return;

    WeightedSumParams params{};
    params.rows = sum.rows;
    params.shared_rows = sum.shared_rows;
    params.shared_weight = sum.shared_weight;
    params.ids = sum.ids;
    params.weights = sum.weights;
    params.out = sum.out;
    params.rows_stride = sum.rows_stride;
    params.shared_stride = sum.shared_stride;
    params.out_stride = sum.out_stride;
    params.tokens = static_cast<uint32_t>(sum.tokens);
    params.top_k = static_cast<uint32_t>(sum.top_k);
    params.hidden = static_cast<uint32_t>(sum.hidden);
    params.pieces_per_token = static_cast<uint32_t>(pieces);
    params.expired = sum.expired;

    constexpr int64_t kWarps = kWeightedSumThreads / ptx::kWarpThreads;
    const int64_t resident = int64_t{num_multiprocessors()} * kWeightedSumBlocksPerSm;
    const uint32_t blocks = static_cast<uint32_t>(std::min(resident, ceil_div(sum.tokens * pieces, kWarps)));
    auto* kernel = sum.dtype == DType::kBFloat16 ? weighted_sum_kernel<bf16> : weighted_sum_kernel<float>;
    launch("mok's weighted sum", kernel, {blocks, kWeightedSumThreads}, stream, params);
}

}  // namespace mok::launch
