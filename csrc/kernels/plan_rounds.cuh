// What the plan's kernel (csrc/kernels/plan.cuh) is made of below its passes: a block's share of the rounds,
// and how the routes of a round are numbered.
#pragma once

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
// A warp's rounds up to which one block does all: a grid barrier costs about a microsecond, a round on all
// warps of a multiprocessor about as much (docs/performance.md). Beyond it warps get one round while there
// are multiprocessors.
inline constexpr uint32_t kPlanRoundsAlone = 2;
inline constexpr uint32_t kPlanRoundsShared = 1;

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
constexpr int kBatchRounds = 4;  // whose ids are loaded before the first is used

/// One block with its place in shared memory.
struct Block {
    const PlanParams& params;
    PlanShared shared;  // absolute addresses
    uint32_t experts;
    uint32_t expert_bits;  // that tell them apart
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
    const uint32_t experts = static_cast<uint32_t>(params.shape.num_local_experts());
    uint32_t expert_bits = 0;
    while (((experts - 1) >> expert_bits) != 0) ++expert_bits;
    return Block{params,
                 shared,
                 experts,
                 expert_bits,
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

/// Rounds of each warp but the last ones.
MOK_DEVICE uint32_t rounds_per_warp(const Block& block, uint32_t num_rounds, uint32_t blocks) {
    return ceil_div(num_rounds, blocks * block.warps);
}

/// Blocks that share the work: one as long as its warps have few rounds, since a grid barrier costs more; at
/// most so many that summing everyone's totals (blocks x experts words each) stays cheaper than the rounds,
/// and none without a round.
MOK_DEVICE uint32_t active_blocks(const Block& block, uint32_t num_rounds) {
    constexpr float kRoundCost = 375.0f;  // (rounds / 32 warps) x 12000 per expert, from cycle estimates
    if (num_rounds <= kPlanRoundsAlone * block.warps) return 1;
    const uint32_t cheapest = static_cast<uint32_t>(
        sqrtf(kRoundCost * static_cast<float>(num_rounds) / static_cast<float>(block.experts)));
    uint32_t blocks = ceil_div(num_rounds, kPlanRoundsShared * block.warps);
    blocks = blocks < cheapest ? blocks : cheapest;
    blocks = blocks < ptx::num_blocks() ? blocks : ptx::num_blocks();
    blocks = blocks > 0 ? blocks : 1;
    return ceil_div(num_rounds, rounds_per_warp(block, num_rounds, blocks) * block.warps);
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
        const uint32_t per_warp = rounds_per_warp(block, num_rounds, blocks);
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

/// The lanes of `routes` with the same expert, by one ballot a bit: match.any takes longer the more experts
/// there are among the lanes, and there are many.
MOK_DEVICE uint32_t same_expert(const Block& block, uint32_t routes, uint32_t expert) {
    uint32_t same = routes;
    for (uint32_t bit = 0; bit < block.expert_bits; ++bit) {
        const bool is_set = (expert >> bit & 1) != 0;
        const uint32_t lanes = ptx::ballot(is_set);
        same &= is_set ? lanes : ~lanes;
    }
    return same;
}

/// A round's routes (expert >= 0) take numbers from the warp's counters, in lane order. A whole warp calls
/// it.
MOK_DEVICE uint32_t take_number(const Block& block, int32_t expert) {
    const bool is_route = expert >= 0;
    const uint32_t routes = ptx::ballot(is_route);
    if (routes == 0) return 0;
    const uint32_t index = is_route ? static_cast<uint32_t>(expert) : 0;
    const uint32_t same = same_expert(block, routes, index);
    const uint32_t before = ptx::popcount(same & ptx::lanes_before());
    const uint32_t counter = block.counter(block.warp, index);
    const uint32_t next = ptx::load_shared<uint32_t>(counter);
    ptx::sync_warp();
    if (is_route && before == 0) ptx::store_shared(counter, next + ptx::popcount(same));
    ptx::sync_warp();
    return next + before;
}

/// Some rounds of a warp and the numbers their routes took.
struct Batch {
    Route routes[kBatchRounds];
    uint32_t numbers[kBatchRounds];
};

/// The next rounds; all their ids are loaded before the first is used.
MOK_DEVICE void take_batch(const Block& block, Rounds& rounds, Batch& batch) {
#pragma unroll
    for (int i = 0; i < kBatchRounds; ++i) batch.routes[i] = rounds.next();
#pragma unroll
    for (int i = 0; i < kBatchRounds; ++i) {
        batch.numbers[i] = take_number(block, local_expert(batch.routes[i].id, block.params.shape));
    }
}

}  // namespace plan_detail

}  // namespace mok
