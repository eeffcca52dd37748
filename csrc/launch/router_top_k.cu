#include <algorithm>
#include <limits>

#include "csrc/kernels/router_top_k.cuh"
#include "csrc/launch/launch.cuh"
#include "csrc/launch/router_top_k.h"
#include "csrc/layout/check.h"
#include "csrc/layout/types.h"

namespace mok::launch {

namespace {

// 64 warps: all that a multiprocessor holds, as many tokens wait for their scores at a time.
constexpr int64_t kBlocksPerSm = 64 * ptx::kWarpThreads / kRouterThreads;

}  // namespace

void load_router_top_k() {
    load_kernel("loading mok's router kernel", router_top_k_kernel);
}

void launch_router_top_k(const RouterTopK& choice, void* stream) {
    // Numbers of tokens and experts are followed in 32 bits, a grid or a batch beyond their ends.
    const int64_t limit = std::numeric_limits<int32_t>::max();
    MOK_CHECK(choice.experts >= 1 && choice.experts <= limit, "num_experts = ", choice.experts,
              ": must be at least 1 and below 2^31.");
    MOK_CHECK(choice.top_k >= 1 && choice.top_k <= std::min<int64_t>(choice.experts, kRouterMostTopK),
              "top_k = ", choice.top_k, ": must be at least 1 and at most ",
              std::min<int64_t>(choice.experts, kRouterMostTopK), " for ", choice.experts, " experts.");
    MOK_CHECK(choice.tokens >= 0 && choice.tokens <= limit, "T = ", choice.tokens,
              ": too many tokens for one call; pass fewer.");
    if (choice.tokens == 0) return;

    RouterTopKParams params{};
    params.scores = choice.scores;
    params.bias = choice.bias;
    params.ids = choice.ids;
    params.tokens = static_cast<uint32_t>(choice.tokens);
    params.experts = static_cast<uint32_t>(choice.experts);
    params.top_k = static_cast<uint32_t>(choice.top_k);
    constexpr int64_t kWarps = kRouterThreads / ptx::kWarpThreads;
    const int64_t resident = int64_t{num_multiprocessors()} * kBlocksPerSm;
    const uint32_t blocks = static_cast<uint32_t>(std::min(resident, ceil_div(choice.tokens, kWarps)));
    launch("mok's router kernel", router_top_k_kernel, {blocks, kRouterThreads}, stream, params);
}

}  // namespace mok::launch
