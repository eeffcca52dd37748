// One block of the kernel that prepares a call: its place in shared memory, sums over the block, and how the
// ranks' rounds are dealt to warps.
#pragma once

#include "csrc/comm/device/peer_barrier.cuh"
#include "csrc/kernels/prepare_params.h"
#include "csrc/ptx/ptx.h"

namespace mok::prepare {

constexpr uint32_t kNoRow = 0xffffffffu;

struct Block {
    const PrepareParams& params;
    PrepareShared shared;  // absolute addresses
    uint32_t experts;
    uint32_t expert_bits;  // that tell them apart
    uint32_t ranks;
    uint32_t top_k;
    uint32_t round_slots;
    uint32_t block_m;
    uint32_t warps;
    uint32_t thread;
    uint32_t warp;
    uint32_t lane;

    MOK_DEVICE uint32_t threads() const { return warps * ptx::kWarpThreads; }
    MOK_DEVICE uint32_t counter(uint32_t of_warp, uint32_t expert) const {
        return shared.counters + 4 * (of_warp * experts + expert);
    }
    MOK_DEVICE uint32_t word(SharedWord which) const {
        return ptx::load_shared<uint32_t>(shared.words + 4 * static_cast<uint32_t>(which));
    }
    MOK_DEVICE void set_word(SharedWord which, uint32_t value) const {
        ptx::store_shared(shared.words + 4 * static_cast<uint32_t>(which), value);
    }
    /// Entry `index` of one of the arrays above.
    MOK_DEVICE static uint32_t entry(uint32_t array, uint32_t index) {
        return ptx::load_shared<uint32_t>(array + 4 * index);
    }
};

MOK_DEVICE Block make_block(const PrepareParams& params) {
    const uint32_t warps = ptx::block_threads() / ptx::kWarpThreads;
    PrepareShared shared = prepare_shared(params.plan.num_ranks, params.plan.num_local_experts(), warps);
    const uint32_t base = ptx::dynamic_shared();
    for (uint32_t* offset : {&shared.words, &shared.num_slots, &shared.warps_end, &shared.total, &shared.base,
                             &shared.begin, &shared.chunk, &shared.warp_sums, &shared.counters}) {
        *offset += base;
    }
    const uint32_t experts = static_cast<uint32_t>(params.plan.num_local_experts());
    uint32_t expert_bits = 0;
    while (((experts - 1) >> expert_bits) != 0) ++expert_bits;
    return Block{params,
                 shared,
                 experts,
                 expert_bits,
                 static_cast<uint32_t>(params.plan.num_ranks),
                 static_cast<uint32_t>(params.plan.top_k),
                 mok::round_slots(params.plan.top_k),
                 static_cast<uint32_t>(params.shape.block_m),
                 warps,
                 ptx::thread_idx(),
                 ptx::warp_idx(),
                 ptx::lane_idx()};
}

MOK_DEVICE void stamp(const Block& block, PrepareStamp moment) {
    if (block.params.times == nullptr || block.thread != 0) return;
    ptx::store_global(block.params.times + ptx::block_idx() * kPrepareStamps + static_cast<uint32_t>(moment),
                      ptx::timer_ns());
}

struct Prefix {
    uint32_t before;  // of earlier threads
    uint32_t total;
};

/// The sum of `value` over the threads before this one, and over all. The whole block calls it.
MOK_DEVICE Prefix block_prefix(const Block& block, uint32_t value) {
    const uint32_t in_warp = ptx::inclusive_sum(value, block.lane);
    if (block.lane == ptx::kWarpThreads - 1) {
        ptx::store_shared(block.shared.warp_sums + 4 * block.warp, in_warp);
    }
    ptx::sync_block();
    const uint32_t warp_sum = block.lane < block.warps ? Block::entry(block.shared.warp_sums, block.lane) : 0;
    const uint32_t before = ptx::reduce_add(block.lane < block.warp ? warp_sum : 0);
    const uint32_t total = ptx::reduce_add(warp_sum);
    ptx::sync_block();  // the next one writes the sums
    return {before + in_warp - value, total};
}

/// The sum over the block's threads. The whole block calls it.
MOK_DEVICE UnitCount block_sum(const Block& block, UnitCount value) {
    const UnitCount in_warp{ptx::reduce_add(value.rows), ptx::reduce_add(value.units)};
    const uint32_t sums = block.shared.warp_sums;
    if (block.lane == 0) {
        ptx::store_shared(sums + 4 * block.warp, in_warp.rows);
        ptx::store_shared(sums + 4 * (kPrepareMaxWarps + block.warp), in_warp.units);
    }
    ptx::sync_block();
    const bool is_warp = block.lane < block.warps;
    const UnitCount all{ptx::reduce_add(is_warp ? Block::entry(sums, block.lane) : 0),
                        ptx::reduce_add(is_warp ? Block::entry(sums, kPrepareMaxWarps + block.lane) : 0)};
    ptx::sync_block();
    return all;
}

/// Every block but the one that makes the table, unless there is only one.
MOK_DEVICE uint32_t most_blocks() {
    return ptx::num_blocks() > 1 ? ptx::num_blocks() - 1 : 1;
}

/// Blocks that share the rounds: a round for each warp while there are multiprocessors (a round on all warps
/// of one costs about as much as a grid barrier, docs/performance.md), at most so many that summing
/// everyone's totals (blocks x experts words each) stays cheaper than the rounds, and at least a warp for
/// each rank.
MOK_DEVICE uint32_t wanted_blocks(const Block& block, uint32_t num_rounds) {
    constexpr float kRoundCost = 375.0f;  // (rounds / 32 warps) x 12000 per expert, from cycle estimates
    const uint32_t cheapest = static_cast<uint32_t>(
        sqrtf(kRoundCost * static_cast<float>(num_rounds) / static_cast<float>(block.experts)));
    uint32_t blocks = ceil_div(num_rounds, block.warps);
    if (blocks > cheapest) blocks = cheapest;
    const uint32_t fewest = ceil_div(block.ranks, block.warps);
    if (blocks < fewest) blocks = fewest;
    return blocks < most_blocks() ? blocks : most_blocks();
}

/// Who works on what: the same in all blocks.
struct Deal {
    bool ended;
    uint32_t blocks;
    uint32_t per_warp;
    uint32_t used_warps;

    MOK_DEVICE uint32_t table_block() const { return ptx::num_blocks() > 1 ? blocks : 0; }
    MOK_DEVICE uint32_t meeting_blocks() const { return ptx::num_blocks() > 1 ? blocks + 1 : 1; }
    MOK_DEVICE bool has_rounds() const { return ptx::block_idx() < blocks; }
};

/// A rank's tokens; a count outside [0, max_tokens] cannot be and is cut, so that nothing is written outside
/// the plan's arrays.
MOK_DEVICE uint32_t num_tokens_of(const Block& block, uint32_t rank) {
    const PrepareParams& params = block.params;
    int64_t tokens = params.header.num_tokens;
    if (block.ranks > 1) tokens = ptx::load_global(&call_header(params.group, rank)->num_tokens);
    const int64_t most = params.plan.max_tokens;
    return static_cast<uint32_t>(tokens < 0 ? 0 : tokens > most ? most : tokens);
}

/// Warps needed for all rounds if none has more than `per_warp`, or rounds of two ranks. One warp calls it.
MOK_DEVICE uint32_t warps_needed(const Block& block, uint32_t per_warp) {
    uint32_t needed = 0;
    for (uint32_t first = 0; first < block.ranks; first += ptx::kWarpThreads) {
        const uint32_t rank = first + block.lane;
        const uint32_t slots = rank < block.ranks ? Block::entry(block.shared.num_slots, rank) : 0;
        needed += ptx::reduce_add(ceil_div(ceil_div(slots, block.round_slots), per_warp));
    }
    return needed;
}

/// Reads the ranks' token counts and deals their rounds: in the order (source rank, slot), contiguous ones to
/// a warp, all of one rank.
MOK_DEVICE Deal deal_rounds(const Block& block) {
    if (block.warp == 0) {
        const bool ended = ptx::ld_relaxed_gpu(block.params.limits.expired) != 0;
        uint32_t rounds = 0;
        for (uint32_t first = 0; first < block.ranks; first += ptx::kWarpThreads) {
            const uint32_t rank = first + block.lane;
            uint32_t slots = 0;
            if (rank < block.ranks) {
                slots = num_tokens_of(block, rank) * block.top_k;
                ptx::store_shared(block.shared.num_slots + 4 * rank, slots);
            }
            rounds += ptx::reduce_add(ceil_div(slots, block.round_slots));
        }
        ptx::sync_warp();
        uint32_t blocks = wanted_blocks(block, rounds);
        uint32_t per_warp = ceil_div(rounds, blocks * block.warps);
        if (per_warp == 0) per_warp = 1;
        while (warps_needed(block, per_warp) > blocks * block.warps) ++per_warp;
        uint32_t used = 0;
        for (uint32_t first = 0; first < block.ranks; first += ptx::kWarpThreads) {
            const uint32_t rank = first + block.lane;
            const uint32_t slots = rank < block.ranks ? Block::entry(block.shared.num_slots, rank) : 0;
            const uint32_t warps = ceil_div(ceil_div(slots, block.round_slots), per_warp);
            const uint32_t end = used + ptx::inclusive_sum(warps, block.lane);
            if (rank < block.ranks) ptx::store_shared(block.shared.warps_end + 4 * rank, end);
            used = ptx::shuffle(end, ptx::kWarpThreads - 1);
        }
        blocks = ceil_div(used, block.warps);
        if (block.lane == 0) {
            block.set_word(SharedWord::kEnded, ended ? 1 : 0);
            block.set_word(SharedWord::kBlocks, blocks > 0 ? blocks : 1);
            block.set_word(SharedWord::kPerWarp, per_warp);
            block.set_word(SharedWord::kUsedWarps, used);
        }
    }
    ptx::sync_block();
    return Deal{block.word(SharedWord::kEnded) != 0, block.word(SharedWord::kBlocks),
                block.word(SharedWord::kPerWarp), block.word(SharedWord::kUsedWarps)};
}

/// A warp's rounds: [round, end) of one rank.
struct Share {
    uint32_t rank;
    uint32_t round;
    uint32_t end;
    uint32_t num_slots;  // of the rank
};

MOK_DEVICE Share make_share(const Block& block, const Deal& deal) {
    const uint32_t index = ptx::block_idx() * block.warps + block.warp;
    uint32_t rank = 0;
    for (uint32_t first = 0; first < block.ranks; first += ptx::kWarpThreads) {
        const uint32_t candidate = first + block.lane;
        const bool is_before =
            candidate < block.ranks && Block::entry(block.shared.warps_end, candidate) <= index;
        rank += ptx::popcount(ptx::ballot(is_before));
    }
    if (rank >= block.ranks) return Share{0, 0, 0, 0};
    const uint32_t before = rank == 0 ? 0 : Block::entry(block.shared.warps_end, rank - 1);
    const uint32_t slots = Block::entry(block.shared.num_slots, rank);
    const uint32_t rounds = ceil_div(slots, block.round_slots);
    const uint32_t round = (index - before) * deal.per_warp;
    const uint32_t end = round + deal.per_warp;
    return Share{rank, round, end < rounds ? end : rounds, slots};
}

}  // namespace mok::prepare
