#include <algorithm>
#include <limits>

#include "csrc/kernels/plan.cuh"
#include "csrc/launch/launch.cuh"
#include "csrc/launch/plan.h"
#include "csrc/layout/check.h"
#include "csrc/layout/plan_host.h"

namespace mok::launch {

namespace {

constexpr int64_t kBarrierBytes = 256;           // a cache line of its own
constexpr int64_t kMaxSharedBytes = 227 * 1024;  // of a block since sm_90

struct PlanLaunch {
    uint32_t warps;
    uint32_t blocks;
};

PlanLaunch plan_launch(const PlanShape& shape) {
    check_plan_shape(shape);
    MOK_CHECK(worst_case_rows(shape) <= std::numeric_limits<int32_t>::max(),
              "max_tokens = ", shape.max_tokens, " with top_k = ", shape.top_k, " on ", shape.num_ranks,
              " ranks: the plan has more than 2^31 rows; pass fewer tokens per call.");
    const int64_t experts = shape.num_local_experts();
    const int64_t fixed = plan_shared(shape.num_ranks, shape.num_local_experts(), 0).bytes;
    const int64_t warps = std::min<int64_t>(kPlanMaxWarps, (kMaxSharedBytes - fixed) / (4 * experts));
    MOK_CHECK(
        warps >= 1, "num_experts = ", shape.num_experts, " on ", shape.num_ranks, " ranks: ", experts,
        " experts on one rank are more than the plan's kernel can count in shared memory; use more ranks.");
    const int64_t rounds = shape.num_ranks * ceil_div<int64_t>(shape.max_tokens * shape.top_k, 32);
    const int64_t wanted = ceil_div(rounds, kPlanRoundsShared * warps);
    const int64_t blocks = rounds <= kPlanRoundsAlone * warps
                               ? 1
                               : std::min<int64_t>(num_multiprocessors(), std::max<int64_t>(1, wanted));
    return {static_cast<uint32_t>(warps), static_cast<uint32_t>(blocks)};
}

}  // namespace

int64_t plan_scratch_bytes(const PlanShape& shape) {
    return kBarrierBytes + int64_t{4} * plan_launch(shape).blocks * shape.num_local_experts();
}

void launch_plan(const PlanShape& shape, const PlanInputs& inputs, const PlanOutputs& outputs, void* scratch,
                 const ptx::WaitLimits& limits, void* stream) {
    const PlanLaunch launched = plan_launch(shape);
    PlanParams params{};
    params.shape = shape;
    params.ids = static_cast<const char*>(inputs.ids);
    params.ids_stride = inputs.ids_stride;
    params.num_tokens = static_cast<const char*>(inputs.num_tokens);
    params.tokens_stride = inputs.tokens_stride;
    params.row_peer = outputs.row_peer;
    params.row_slot = outputs.row_slot;
    params.segment_begin = outputs.segment_begin;
    params.counts = outputs.counts;
    params.barrier = static_cast<uint32_t*>(scratch);
    params.block_counts = reinterpret_cast<uint32_t*>(static_cast<char*>(scratch) + kBarrierBytes);
    params.limits = limits;
    LaunchShape grid{launched.blocks, launched.warps * ptx::kWarpThreads};
    grid.shared_bytes = plan_shared(shape.num_ranks, shape.num_local_experts(), launched.warps).bytes;
    grid.cooperative = launched.blocks > 1;
    launch("mok's plan kernel", plan_kernel, grid, stream, params);
}

}  // namespace mok::launch
