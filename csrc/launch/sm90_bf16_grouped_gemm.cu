#include <limits>

#include "csrc/kernels/sm90_bf16_grouped_gemm.cuh"
#include "csrc/launch/launch.cuh"
#include "csrc/launch/sm90_bf16_grouped_gemm.h"
#include "csrc/launch/sm90_bf16_maps.h"
#include "csrc/layout/check.h"

namespace mok::launch {

void launch_sm90_bf16_grouped_gemm(const GroupedGemm& gemm, const ptx::WaitLimits& limits, void* stream) {
    constexpr int32_t kGroupM = 16;  // row tiles that run side by side through all column tiles
    const WeightView& weights = gemm.weights;
    MOK_CHECK(weights.rows > 0 && weights.rows % 8 == 0 && weights.columns > 0 && weights.columns % 8 == 0,
              "weights are [E, ", weights.rows, ", ", weights.columns,
              "]: both must be positive multiples of 8.");
    MOK_CHECK(gemm.rows >= 0 && gemm.rows <= std::numeric_limits<int32_t>::max(), "x has ", gemm.rows,
              " rows: one call takes up to 2^31 - 1.");
    if (gemm.rows == 0) return;
    GroupedGemmParams params{};
    params.x = row_map(gemm.x, gemm.rows, weights.columns, gemm.x_stride);
    params.weights = weight_map(weights);
    params.y = row_map(gemm.y, gemm.rows, weights.rows, gemm.y_stride);
    params.segment_begin = gemm.segment_begin;
    params.counts = gemm.counts;
    params.claim = gemm.claim;
    params.num_experts = static_cast<int32_t>(weights.experts);
    params.columns = static_cast<int32_t>(weights.rows);
    params.k_steps = static_cast<int32_t>(ceil_div<int64_t>(weights.columns, sm90::kTileK));
    params.group_m = kGroupM;
    params.limits = limits;
    launch("mok's grouped GEMM", sm90_bf16_grouped_gemm_kernel,
           {num_multiprocessors(), sm90::kThreads, sm90::Shared::kBytes}, stream, params);
}

}  // namespace mok::launch
