// The plan on the device: a stable counting sort of all ranks' routes by local expert, equal to build_plan of
// csrc/layout/plan_host.h bit for bit. Integers only, and every sum is independent of who comes first.
//
// A round is 32 consecutive slots of one rank. Rounds in the order (source rank, slot) are dealt to warps in
// contiguous runs, so warp order is row order. One launch, two passes over the ids:
//   1. each warp counts its routes per expert in its own row of shared memory; the block turns the rows into
//      prefixes over its warps and publishes its totals;
//   --- grid barrier (none when one block does all) ---
//   2. every block sums the totals of all blocks and of those before it, scans the padded totals into segment
//      starts, and its warps go over their rounds again: a route's row is its warp's counter plus the number
//      of lanes before it with the same expert.
// How many blocks take part follows from the ranks' token counts, which are data; the others leave at once.
#pragma once

#include "csrc/comm/device/grid_barrier.cuh"
#include "csrc/layout/plan.h"
#include "csrc/ptx/ptx.h"

namespace mok {

struct PlanParams {
    PlanShape shape;
    const char* ids;  // int32 [T_r * K] of rank r at r * ids_stride bytes
    int64_t ids_stride;
    const char* num_tokens;  // int64 T_r at r * tokens_stride bytes
    int64_t tokens_stride;
    int32_t* row_peer;       // [worst_case_rows]
    int32_t* row_slot;       // [worst_case_rows]
    int64_t* segment_begin;  // [E_local + 1]
    int64_t* counts;         // [E_local]
    uint32_t* block_counts;  // [blocks, E_local], scratch
    uint32_t* barrier;       // grid_barrier's word
    ptx::WaitLimits limits;
};

inline constexpr uint32_t kPlanMaxWarps = 32;
inline constexpr uint32_t kPlanPlaceBarrier = 1;  // WaitRecord::place
// A warp's rounds up to which one block does all, and the fewest that are worth a further block.
inline constexpr uint32_t kPlanRoundsAlone = 8;
inline constexpr uint32_t kPlanRoundsShared = 2;

/// Offsets in the block's shared memory; `warps` rows of counters come last.
struct PlanShared {
    uint32_t rounds_end;  // u32 [R]: rounds of ranks 0..r
    uint32_t num_slots;   // u32 [R]
    uint32_t total;       // u32 [E_local]: routes of the expert
    uint32_t base;        // u32 [E_local]: first its routes in earlier blocks, then this block's first row
    uint32_t begin;       // u32 [E_local]: segment_begin
    uint32_t warp_sums;   // u32 [kPlanMaxWarps]
    uint32_t counters;    // u32 [warps, E_local]
    uint32_t bytes;
};

MOK_HD PlanShared plan_shared(int32_t num_ranks, int32_t num_local_experts, uint32_t warps) {
    const uint32_t ranks = static_cast<uint32_t>(num_ranks);
    const uint32_t experts = static_cast<uint32_t>(num_local_experts);
    PlanShared shared{};
    shared.num_slots = shared.rounds_end + 4 * ranks;
    shared.total = shared.num_slots + 4 * ranks;
    shared.base = shared.total + 4 * experts;
    shared.begin = shared.base + 4 * experts;
    shared.warp_sums = shared.begin + 4 * experts;
    shared.counters = shared.warp_sums + 4 * kPlanMaxWarps;
    shared.bytes = shared.counters + 4 * warps * experts;
    return shared;
}

namespace plan_detail {

constexpr uint32_t kRoundSlots = ptx::kWarpThreads;
constexpr int kUnroll = 4;  // rounds whose ids are loaded before the first is used

/// One block with its place in shared memory.
struct Block {
    const PlanParams& params;
    PlanShared shared;  // absolute addresses
    uint32_t experts;
    uint32_t ranks;
    uint32_t warps;
    uint32_t thread;
    uint32_t warp;
    uint32_t lane;

    MOK_DEVICE uint32_t counter(uint32_t of_warp, uint32_t expert) const {
        return shared.counters + 4 * (of_warp * experts + expert);
    }
    MOK_DEVICE uint32_t threads() const { return warps * ptx::kWarpThreads; }
};

MOK_DEVICE Block make_block(const PlanParams& params) {
    const uint32_t warps = ptx::block_threads() / ptx::kWarpThreads;
    PlanShared shared = plan_shared(params.shape.num_ranks, params.shape.num_local_experts(), warps);
    const uint32_t base = ptx::dynamic_shared();
    shared.rounds_end += base;
    shared.num_slots += base;
    shared.total += base;
    shared.base += base;
    shared.begin += base;
    shared.warp_sums += base;
    shared.counters += base;
    return Block{params,
                 shared,
                 static_cast<uint32_t>(params.shape.num_local_experts()),
                 static_cast<uint32_t>(params.shape.num_ranks),
                 warps,
                 ptx::thread_idx(),
                 ptx::warp_idx(),
                 ptx::lane_idx()};
}

/// Reads the ranks' token counts (a count outside [0, max_tokens] cannot be and is cut, so that it cannot
/// write outside the plan either); returns the rounds of all ranks.
MOK_DEVICE uint32_t read_token_counts(const Block& block) {
    const PlanShape& shape = block.params.shape;
    if (block.warp == 0) {
        uint32_t before = 0;
        for (uint32_t first = 0; first < block.ranks; first += ptx::kWarpThreads) {
            const uint32_t rank = first + block.lane;
            uint32_t slots = 0;
            if (rank < block.ranks) {
                int64_t tokens = ptx::load_global(reinterpret_cast<const int64_t*>(
                    block.params.num_tokens + rank * block.params.tokens_stride));
                tokens = tokens < 0 ? 0 : tokens > shape.max_tokens ? shape.max_tokens : tokens;
                slots = static_cast<uint32_t>(tokens * shape.top_k);
                ptx::store_shared(block.shared.num_slots + 4 * rank, slots);
            }
            const uint32_t end = before + ptx::inclusive_sum(ceil_div(slots, kRoundSlots), block.lane);
            if (rank < block.ranks) ptx::store_shared(block.shared.rounds_end + 4 * rank, end);
            before = ptx::shuffle(end, ptx::kWarpThreads - 1);
        }
    }
    ptx::sync_block();
    return ptx::load_shared<uint32_t>(block.shared.rounds_end + 4 * (block.ranks - 1));
}

/// Blocks that share the work: one as long as its warps have few rounds, since a grid barrier costs more; at
/// most so many that summing everyone's totals (blocks x experts words each) stays cheaper than the rounds.
MOK_DEVICE uint32_t active_blocks(const Block& block, uint32_t num_rounds) {
    constexpr float kRoundCost = 375.0f;  // (rounds / 32 warps) x 12000 per expert, from cycle estimates
    if (num_rounds <= kPlanRoundsAlone * block.warps) return 1;
    const uint32_t cheapest = static_cast<uint32_t>(
        sqrtf(kRoundCost * static_cast<float>(num_rounds) / static_cast<float>(block.experts)));
    uint32_t blocks = ceil_div(num_rounds, kPlanRoundsShared * block.warps);
    blocks = blocks < cheapest ? blocks : cheapest;
    blocks = blocks < ptx::num_blocks() ? blocks : ptx::num_blocks();
    return blocks > 0 ? blocks : 1;
}

/// One slot of a round in one lane.
struct Route {
    uint32_t rank;
    uint32_t slot;
    int32_t id;  // -1: none
};

/// The warp's rounds, in order.
struct Rounds {
    const Block& block;
    uint32_t round;
    uint32_t end;
    uint32_t rank;
    uint32_t rank_begin;
    uint32_t rank_end;

    MOK_DEVICE Rounds(const Block& block_in, uint32_t num_rounds, uint32_t blocks) : block(block_in) {
        const uint32_t per_warp = ceil_div(num_rounds, blocks * block.warps);
        round = per_warp * (ptx::block_idx() * block.warps + block.warp);
        end = round + per_warp < num_rounds ? round + per_warp : num_rounds;
        rank = 0;
        for (uint32_t first = 0; first < block.ranks; first += ptx::kWarpThreads) {
            const uint32_t candidate = first + block.lane;
            const bool is_before = candidate < block.ranks && rounds_end(candidate) <= round;
            rank += ptx::popcount(ptx::ballot(is_before));
        }
        rank_begin = rank == 0 ? 0 : rounds_end(rank - 1);
        rank_end = rank < block.ranks ? rounds_end(rank) : 0xffffffffu;
    }

    MOK_DEVICE uint32_t rounds_end(uint32_t of_rank) const {
        return ptx::load_shared<uint32_t>(block.shared.rounds_end + 4 * of_rank);
    }

    MOK_DEVICE bool is_done() const { return round >= end; }

    /// This lane's slot of the round; no route past the end of the warp's rounds or the rank's slots.
    MOK_DEVICE Route next() {
        Route route{rank, 0, -1};
        if (is_done()) return route;
        while (round >= rank_end) {  // ends: round < rounds_end of the last rank
            rank_begin = rank_end;
            rank_end = rounds_end(++rank);
        }
        route.rank = rank;
        route.slot = (round - rank_begin) * kRoundSlots + block.lane;
        if (route.slot < ptx::load_shared<uint32_t>(block.shared.num_slots + 4 * rank)) {
            const char* ids = block.params.ids + rank * block.params.ids_stride;
            route.id = ptx::load_global(reinterpret_cast<const int32_t*>(ids) + route.slot);
        }
        ++round;
        return route;
    }
};

/// Calls visit(route, local expert or -1, lanes with the same) for all rounds of the warp that have a row
/// here.
template <typename Visit>
MOK_DEVICE void for_routes(const Block& block, uint32_t num_rounds, uint32_t blocks, const Visit& visit) {
    for (Rounds rounds(block, num_rounds, blocks); !rounds.is_done();) {
        Route routes[kUnroll];
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) routes[i] = rounds.next();
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
            const int32_t expert = local_expert(routes[i].id, block.params.shape);
            if (!ptx::any_lane(expert >= 0)) continue;
            visit(routes[i], expert, ptx::match_any(static_cast<uint32_t>(expert)));
            ptx::sync_warp();
        }
    }
}

/// Pass 1: counters become the block's prefixes over its warps; totals go to block_counts (or stay, alone).
MOK_DEVICE void count_routes(const Block& block, uint32_t num_rounds, uint32_t blocks) {
    for (uint32_t i = block.thread; i < block.warps * block.experts; i += block.threads()) {
        ptx::store_shared(block.shared.counters + 4 * i, 0u);
    }
    ptx::sync_block();
    for_routes(block, num_rounds, blocks, [&](const Route&, int32_t expert, uint32_t same) {
        if (expert < 0 || (same & ptx::lanes_before()) != 0) return;
        const uint32_t counter = block.counter(block.warp, static_cast<uint32_t>(expert));
        ptx::store_shared(counter, ptx::load_shared<uint32_t>(counter) + ptx::popcount(same));
    });
    ptx::sync_block();
    constexpr uint32_t kWarpsAtATime = 8;
    for (uint32_t expert = block.thread; expert < block.experts; expert += block.threads()) {
        uint32_t sum = 0;
        for (uint32_t first = 0; first < block.warps; first += kWarpsAtATime) {
            uint32_t counts[kWarpsAtATime];
#pragma unroll
            for (uint32_t i = 0; i < kWarpsAtATime; ++i) {
                const bool is_warp = first + i < block.warps;
                counts[i] = is_warp ? ptx::load_shared<uint32_t>(block.counter(first + i, expert)) : 0;
            }
#pragma unroll
            for (uint32_t i = 0; i < kWarpsAtATime; ++i) {
                if (first + i < block.warps) ptx::store_shared(block.counter(first + i, expert), sum);
                sum += counts[i];
            }
        }
        ptx::store_shared(block.shared.total + 4 * expert, blocks == 1 ? sum : 0u);
        ptx::store_shared(block.shared.base + 4 * expert, 0u);
        if (blocks > 1) {
            ptx::store_global(block.params.block_counts + ptx::block_idx() * block.experts + expert, sum);
        }
    }
}

/// Sums block_counts: `total` over all blocks, `base` over those before this one.
MOK_DEVICE void sum_block_counts(const Block& block, uint32_t blocks) {
    const uint32_t parts = block.threads() > block.experts ? block.threads() / block.experts : 1;
    for (uint32_t i = block.thread; i < parts * block.experts; i += block.threads()) {
        const uint32_t expert = i % block.experts;
        uint32_t total = 0, before = 0;
#pragma unroll 8
        for (uint32_t other = i / block.experts; other < blocks; other += parts) {
            const uint32_t count =
                ptx::load_global(block.params.block_counts + other * block.experts + expert);
            total += count;
            before += other < ptx::block_idx() ? count : 0;
        }
        ptx::red_relaxed_cta_shared_add(block.shared.total + 4 * expert, total);
        ptx::red_relaxed_cta_shared_add(block.shared.base + 4 * expert, before);
    }
    ptx::sync_block();
}

/// Segment starts from the padded totals; `base` becomes this block's first row of each expert. Block 0
/// writes segment_begin and counts.
MOK_DEVICE void scan_segments(const Block& block) {
    const uint32_t pad = static_cast<uint32_t>(block.params.shape.pad);
    const bool writes = ptx::block_idx() == 0;
    uint32_t before = 0;
    for (uint32_t first = 0; first < block.experts; first += block.threads()) {
        const uint32_t expert = first + block.thread;
        const bool is_expert = expert < block.experts;
        const uint32_t total = is_expert ? ptx::load_shared<uint32_t>(block.shared.total + 4 * expert) : 0;
        const uint32_t rows = round_up(total, pad);
        const uint32_t in_warp = ptx::inclusive_sum(rows, block.lane);
        if (block.lane == ptx::kWarpThreads - 1) {
            ptx::store_shared(block.shared.warp_sums + 4 * block.warp, in_warp);
        }
        ptx::sync_block();
        const uint32_t warp_sum = block.lane < block.warps
                                      ? ptx::load_shared<uint32_t>(block.shared.warp_sums + 4 * block.lane)
                                      : 0;
        const uint32_t warps_before = ptx::reduce_add(block.lane < block.warp ? warp_sum : 0);
        const uint32_t all_warps = ptx::reduce_add(warp_sum);
        if (is_expert) {
            const uint32_t begin = before + warps_before + in_warp - rows;
            const uint32_t base = block.shared.base + 4 * expert;
            ptx::store_shared(block.shared.begin + 4 * expert, begin);
            ptx::store_shared(base, ptx::load_shared<uint32_t>(base) + begin);
            if (writes) {
                ptx::store_global(block.params.segment_begin + expert, static_cast<int64_t>(begin));
                ptx::store_global(block.params.counts + expert, static_cast<int64_t>(total));
            }
        }
        before += all_warps;
        ptx::sync_block();
    }
    if (writes && block.thread == 0) {
        ptx::store_global(block.params.segment_begin + block.experts, static_cast<int64_t>(before));
    }
}

/// -1 into the padding rows of every blocks-th expert.
MOK_DEVICE void fill_padding(const Block& block, uint32_t blocks) {
    const uint32_t pad = static_cast<uint32_t>(block.params.shape.pad);
    for (uint32_t expert = ptx::block_idx() + block.warp * blocks; expert < block.experts;
         expert += blocks * block.warps) {
        const uint32_t begin = ptx::load_shared<uint32_t>(block.shared.begin + 4 * expert);
        const uint32_t total = ptx::load_shared<uint32_t>(block.shared.total + 4 * expert);
        for (uint32_t row = total + block.lane; row < round_up(total, pad); row += ptx::kWarpThreads) {
            ptx::store_global(block.params.row_peer + begin + row, -1);
            ptx::store_global(block.params.row_slot + begin + row, -1);
        }
    }
}

/// Pass 2: every route to its row.
MOK_DEVICE void place_routes(const Block& block, uint32_t num_rounds, uint32_t blocks) {
    for (uint32_t i = block.thread; i < block.warps * block.experts; i += block.threads()) {
        const uint32_t counter = block.shared.counters + 4 * i;
        const uint32_t base = ptx::load_shared<uint32_t>(block.shared.base + 4 * (i % block.experts));
        ptx::store_shared(counter, ptx::load_shared<uint32_t>(counter) + base);
    }
    ptx::sync_block();
    for_routes(block, num_rounds, blocks, [&](const Route& route, int32_t expert, uint32_t same) {
        const bool is_route = expert >= 0;
        const uint32_t counter = block.counter(block.warp, is_route ? static_cast<uint32_t>(expert) : 0);
        const uint32_t lanes_before = ptx::popcount(same & ptx::lanes_before());
        const uint32_t next = ptx::load_shared<uint32_t>(counter);
        ptx::sync_warp();
        if (!is_route) return;
        if (lanes_before == 0) ptx::store_shared(counter, next + ptx::popcount(same));
        const uint32_t row = next + lanes_before;
        ptx::store_global(block.params.row_peer + row, static_cast<int32_t>(route.rank));
        ptx::store_global(block.params.row_slot + row, static_cast<int32_t>(route.slot));
    });
}

}  // namespace plan_detail

__global__ void __launch_bounds__(kPlanMaxWarps* ptx::kWarpThreads, 1)
    plan_kernel(const __grid_constant__ PlanParams params) {
    using namespace plan_detail;
    const Block block = make_block(params);
    const uint32_t num_rounds = read_token_counts(block);
    const uint32_t blocks = active_blocks(block, num_rounds);
    if (ptx::block_idx() >= blocks) return;
    count_routes(block, num_rounds, blocks);
    if (blocks > 1) {
        ptx::Deadline deadline(params.limits, kPlanPlaceBarrier);
        if (!grid_barrier(params.barrier, blocks, deadline)) {
            ptx::trap();
            return;
        }
        sum_block_counts(block, blocks);
    } else {
        ptx::sync_block();
    }
    scan_segments(block);
    fill_padding(block, blocks);
    place_routes(block, num_rounds, blocks);
}

}  // namespace mok
