// A router's choice: ids[t] = the top_k experts with the largest scores[t] + bias, the best first, of equal
// ones the lowest id first.
//
// One warp a token. Scores become integers of the same order, so that -0 and +0 are equal and a NaN has a
// place. Lane i holds the i-th best expert of those looked at; experts come in the order of their ids, 32 at
// a time, and a ballot finds those that beat the last of the top_k, usually few. One of them goes in behind
// all that are as good or better, the others move up a lane; the rest of the 32 is compared again. Loads of
// kBatch x 32 scores are in flight together. No shared memory, no barriers; what is read was written before
// the kernel began.
#pragma once

#include "csrc/ptx/ptx.h"

namespace mok {

struct RouterTopKParams {
    const float* scores;  // [tokens, experts]
    const float* bias;    // [experts]; nullptr: none
    int64_t* ids;         // [tokens, top_k]
    uint32_t tokens;
    uint32_t experts;
    uint32_t top_k;  // at most experts and kRouterMostTopK
};

inline constexpr uint32_t kRouterThreads = 256;
inline constexpr uint32_t kRouterMostTopK = 32;  // one lane each

namespace router_top_k_detail {

constexpr uint32_t kBatch = 4;

/// Ordered like the values; both zeros give the same.
MOK_DEVICE uint32_t order_of(float value) {
    const uint32_t bits = ptx::float_bits(value + 0.0f);
    return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}

/// Lane i's is the i-th best expert; `count` and `last` are the same in all lanes.
struct Best {
    uint32_t order = 0;
    uint32_t expert = 0;
    uint32_t count = 0;  // of lanes that hold one
    uint32_t last = 0;   // the order of the top_k-th, once there are as many
};

/// Takes in experts first..first + 31, of which each lane has one.
MOK_DEVICE void take(Best& best, uint32_t order, bool is_expert, uint32_t first, uint32_t top_k,
                     uint32_t lane) {
    uint32_t better = ptx::ballot(is_expert && (best.count < top_k || order > best.last));
    while (better != 0) {
        const uint32_t source = ptx::popcount(~better & (better - 1));  // the lowest set bit
        better &= better - 1;
        const uint32_t taken = ptx::shuffle(order, source);
        const uint32_t place = ptx::popcount(ptx::ballot(lane < best.count && best.order >= taken));
        const uint32_t order_below = ptx::shuffle_up(best.order, 1);
        const uint32_t expert_below = ptx::shuffle_up(best.expert, 1);
        if (lane > place) {
            best.order = order_below;
            best.expert = expert_below;
        } else if (lane == place) {
            best.order = taken;
            best.expert = first + source;
        }
        if (best.count < top_k) ++best.count;
        if (best.count == top_k) {
            best.last = ptx::shuffle(best.order, top_k - 1);
            better &= ptx::ballot(order > best.last);
        }
    }
}

}  // namespace router_top_k_detail

__global__ void __launch_bounds__(kRouterThreads)
    router_top_k_kernel(const __grid_constant__ RouterTopKParams params) {
    using namespace router_top_k_detail;
    constexpr uint32_t kWarps = kRouterThreads / ptx::kWarpThreads;
    const uint32_t lane = ptx::lane_idx();
    const uint32_t experts = params.experts;
    const uint32_t num_warps = ptx::num_blocks() * kWarps;
    for (uint32_t token = ptx::block_idx() * kWarps + ptx::warp_idx(); token < params.tokens;
         token += num_warps) {
        const float* row = params.scores + static_cast<int64_t>(token) * experts;
        Best best;
        for (uint32_t first = 0; first < experts; first += kBatch * ptx::kWarpThreads) {
            float scores[kBatch];
#pragma unroll
            for (uint32_t i = 0; i < kBatch; ++i) {
                const uint32_t expert = first + i * ptx::kWarpThreads + lane;
                scores[i] = expert < experts ? ptx::load_global(row + expert) : 0.0f;
            }
            if (params.bias != nullptr) {
#pragma unroll
                for (uint32_t i = 0; i < kBatch; ++i) {
                    const uint32_t expert = first + i * ptx::kWarpThreads + lane;
                    if (expert < experts) scores[i] += ptx::load_global(params.bias + expert);
                }
            }
#pragma unroll
            for (uint32_t i = 0; i < kBatch; ++i) {
                const uint32_t begin = first + i * ptx::kWarpThreads;
                take(best, order_of(scores[i]), begin + lane < experts, begin, params.top_k, lane);
            }
        }
        if (lane < params.top_k) {
            ptx::store_global(params.ids + static_cast<int64_t>(token) * params.top_k + lane,
                              static_cast<int64_t>(best.expert));
        }
    }
}

}  // namespace mok
