// Pass 1 of the preparation: a look at all ids, which counts the routes of each local expert.
//
// A round is 32 lanes with whole tokens of one rank, a route a lane. A warp counts in its own row of shared
// memory; then the block turns the rows into prefixes over its warps and publishes its totals. A warp with
// few rounds keeps their experts and numbers for pass 2; else pass 2 looks at those rounds again that have a
// row here, by the masks that this one leaves.
#pragma once

#include "csrc/kernels/prepare_block.cuh"

namespace mok::prepare {

constexpr uint32_t kBatchRounds = 4;  // whose ids are loaded before the first is used

/// Some rounds of a warp, and the numbers that their routes took among those of the same expert.
struct Batch {
    uint32_t slot[kBatchRounds];
    int32_t expert[kBatchRounds];  // local; -1: no row here
    uint32_t number[kBatchRounds];
};

MOK_DEVICE bool keeps_batch(const Deal& deal) {
    return deal.per_warp <= kBatchRounds;
}

/// Slot `index` of the copies of ids and of token_rows.
MOK_DEVICE int64_t slot_place(const Block& block, uint32_t rank, uint32_t slot) {
    return static_cast<int64_t>(rank) * block.params.plan.max_tokens * block.top_k + slot;
}

MOK_DEVICE int32_t read_id(const Block& block, uint32_t rank, uint32_t slot) {
    const PrepareParams& params = block.params;
    if (block.ranks > 1) {
        const char* ids = window_of(params.group, rank) + params.ids_offset;
        return ptx::load_global(reinterpret_cast<const int32_t*>(ids) + slot);
    }
    const int64_t id = params.ids_are_int64
                           ? ptx::load_global(static_cast<const int64_t*>(params.topk_ids) + slot)
                           : ptx::load_global(static_cast<const int32_t*>(params.topk_ids) + slot);
    return normalized_expert(id, params.plan.num_experts);
}

struct Ids {
    int32_t id[kBatchRounds];
};

/// This lane's ids of rounds [round, end), at most a batch; -1 where there is no slot.
MOK_DEVICE Ids load_ids(const Block& block, const Share& share, uint32_t round, uint32_t end) {
    Ids ids;
#pragma unroll
    for (uint32_t i = 0; i < kBatchRounds; ++i) {
        const uint32_t slot = (round + i) * block.round_slots + block.lane;
        const bool is_slot = round + i < end && block.lane < block.round_slots && slot < share.num_slots;
        ids.id[i] = is_slot ? read_id(block, share.rank, slot) : -1;
    }
    return ids;
}

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

/// A round's routes take numbers from the warp's counters, in lane order; `routes` are the lanes with one. A
/// whole warp calls it.
MOK_DEVICE uint32_t take_number(const Block& block, uint32_t routes, int32_t expert) {
    if (routes == 0) return 0;
    const bool is_route = expert >= 0;
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

/// Numbers the routes of a batch. One rank alone leaves its published ids; where pass 2 looks again, several
/// leave copies of the ids that have a row here, and masks of their lanes.
MOK_DEVICE Batch count_batch(const Block& block, const Deal& deal, const Share& share, uint32_t round,
                             const Ids& ids) {
    const bool looks_again = !keeps_batch(deal);
    int32_t* copies = block.params.arrays.ids;
    Batch batch;
    uint32_t mask = 0;  // of round i in lane i
#pragma unroll
    for (uint32_t i = 0; i < kBatchRounds; ++i) {
        const uint32_t slot = (round + i) * block.round_slots + block.lane;
        const int32_t expert = local_expert(ids.id[i], block.params.plan);
        const uint32_t routes = ptx::ballot(expert >= 0);
        if (block.lane == i) mask = routes;
        const bool is_slot =
            round + i < share.end && block.lane < block.round_slots && slot < share.num_slots;
        if (block.ranks == 1 ? is_slot : looks_again && expert >= 0) {
            ptx::store_global(copies + slot_place(block, share.rank, slot), ids.id[i]);
        }
        batch.slot[i] = slot;
        batch.expert[i] = expert;
        batch.number[i] = take_number(block, routes, expert);
    }
    if (looks_again && block.lane < kBatchRounds && round + block.lane < share.end) {
        const int64_t most = rounds_of(block.params.plan.max_tokens, block.params.plan.top_k);
        ptx::store_global(
            block.params.arrays.round_masks + static_cast<int64_t>(share.rank) * most + round + block.lane,
            mask);
    }
    return batch;
}

/// Returns the last batch: all of the warp's rounds if keeps_batch.
MOK_DEVICE Batch count_routes(const Block& block, const Deal& deal, const Share& share) {
    for (uint32_t expert = block.lane; expert < block.experts; expert += ptx::kWarpThreads) {
        ptx::store_shared(block.counter(block.warp, expert), 0u);
    }
    ptx::sync_warp();
    Batch batch;
#pragma unroll
    for (uint32_t i = 0; i < kBatchRounds; ++i) batch.expert[i] = -1;
    // The next batch's ids are on their way while this one is numbered.
    Ids ids = load_ids(block, share, share.round, share.end);
    for (uint32_t round = share.round; round < share.end; round += kBatchRounds) {
        const Ids next = load_ids(block, share, round + kBatchRounds, share.end);
        batch = count_batch(block, deal, share, round, ids);
        ids = next;
    }
    return batch;
}

/// The warps' counters become the block's prefixes over its warps; the sums go to block_counts.
MOK_DEVICE void publish_counts(const Block& block) {
    constexpr uint32_t kWarpsAtATime = 8;
    ptx::sync_block();
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
        ptx::store_global(block.params.arrays.block_counts +
                              static_cast<int64_t>(ptx::block_idx()) * block.experts + expert,
                          sum);
    }
}

/// Zeros where pass 2 adds up, by all meeting blocks: no launch relies on what the last one left.
MOK_DEVICE void clear_tile_counts(const Block& block, const Deal& deal) {
    const int64_t tiles = worst_case_rows(block.params.plan) / kTileRows;
    const int64_t step = static_cast<int64_t>(deal.meeting_blocks()) * block.threads();
    for (int64_t tile = static_cast<int64_t>(ptx::block_idx()) * block.threads() + block.thread; tile < tiles;
         tile += step) {
        ptx::store_global(block.params.arrays.tile_counts + tile, uint64_t{0});
    }
    for (uint32_t expert = block.thread; expert < block.experts; expert += block.threads()) {
        ptx::store_shared(block.shared.total + 4 * expert, 0u);
        ptx::store_shared(block.shared.base + 4 * expert, 0u);
    }
}

}  // namespace mok::prepare
