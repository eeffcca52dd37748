// Pass 1 of the preparation: a look at all ids, which counts the routes of each local expert.
//
// A round is 32 lanes with whole tokens of one rank, a route a lane. A warp counts in its own row of shared
// memory; then the block turns the rows into prefixes over its warps and publishes its totals. A warp with
// few rounds keeps their experts and numbers for pass 2; else pass 2 looks at those rounds again that have a
// row here, by the masks that this one leaves.
#pragma once

#include "csrc/kernels/prepare_rows.cuh"

namespace mok::prepare {

constexpr uint32_t kBatchRounds = 4;  // whose ids are loaded before the first is used

/// This lane's word of each round of a batch; an index that is not known costs three selections.
struct Batch {
    uint32_t word[kBatchRounds];

    MOK_DEVICE uint32_t get(uint32_t index) const {
        uint32_t value = word[0];
#pragma unroll
        for (uint32_t i = 1; i < kBatchRounds; ++i) value = index == i ? word[i] : value;
        return value;
    }
    MOK_DEVICE void set(uint32_t index, uint32_t value) {
#pragma unroll
        for (uint32_t i = 0; i < kBatchRounds; ++i) word[i] = index == i ? value : word[i];
    }
};

/// A route: its expert (local) and its number among the warp's routes of that expert.
MOK_DEVICE uint32_t pack_route(uint32_t expert, uint32_t number) {
    return expert | number << 16;
}
constexpr uint32_t kNoRoute = 0xffffffffu;

MOK_DEVICE bool keeps_batch(const Deal& deal) {
    return deal.per_warp <= kBatchRounds;
}

/// The local expert of a published id, kNoRoute where it has no row here.
MOK_DEVICE uint32_t expert_of(const Block& block, uint32_t id) {
    const uint32_t expert = id - static_cast<uint32_t>(block.params.plan.first_expert());
    return expert < block.experts ? expert : kNoRoute;
}

/// Rank `rank`'s part of the copies of ids.
MOK_DEVICE int64_t slots_of(const Block& block, uint32_t rank) {
    return static_cast<int64_t>(rank) * block.params.slots;
}

/// This lane's ids of the next rounds, from its `slot` of the first on, as int32; kNoRoute from `end_slot`
/// on.
MOK_DEVICE Batch load_ids(const char* ids, bool is_wide, uint32_t slot, uint32_t end_slot, uint32_t step) {
    Batch batch;
#pragma unroll
    for (uint32_t i = 0; i < kBatchRounds; ++i) {
        const uint32_t at = slot + i * step;
        batch.word[i] = kNoRoute;
        if (at < end_slot) {
            const int64_t offset = static_cast<int64_t>(at) * (is_wide ? 8 : 4);
            batch.word[i] = ptx::load_global(reinterpret_cast<const uint32_t*>(ids + offset));
        }
    }
    if (!is_wide) return batch;
#pragma unroll
    for (uint32_t i = 0; i < kBatchRounds; ++i) {
        const uint32_t at = slot + i * step;
        if (at >= end_slot) continue;
        const auto* upper = reinterpret_cast<const uint32_t*>(ids + static_cast<int64_t>(at) * 8 + 4);
        if (ptx::load_global(upper) != 0) batch.word[i] = kNoRoute;
    }
    return batch;
}

/// The lanes of `routes` with the same expert, by one ballot a bit: match.any takes longer the more experts
/// there are among the lanes, and there are many.
MOK_DEVICE uint32_t same_expert(const Block& block, uint32_t routes, uint32_t expert) {
    uint32_t same = routes;
#pragma unroll 1
    for (uint32_t rest = block.experts - 1, bit = 0; rest != 0; rest >>= 1, ++bit) {
        const bool is_set = (expert >> bit & 1) != 0;
        const uint32_t lanes = ptx::ballot(is_set);
        same &= is_set ? lanes : ~lanes;
    }
    return same;
}

/// A round's routes take numbers from the warp's counters, in lane order; `routes` are the lanes with one. A
/// whole warp calls it.
MOK_DEVICE uint32_t take_number(const Block& block, uint32_t routes, uint32_t expert) {
    const bool is_route = expert != kNoRoute;
    const uint32_t same = same_expert(block, routes, expert);
    const uint32_t before = ptx::popcount(same & ptx::lanes_before());
    const uint32_t counter = block.counter(block.warp, is_route ? expert : 0);
    const uint32_t next = ptx::load_shared<uint32_t>(counter);
    ptx::sync_warp();
    if (is_route && before == 0) ptx::store_shared(counter, next + ptx::popcount(same));
    ptx::sync_warp();
    return next + before;
}

/// Numbers the routes of the warp's rounds; returns those of the last batch, which is all if keeps_batch. One
/// rank alone leaves its published ids; where pass 2 looks again, several leave copies of the ids that have a
/// row here, and masks of their lanes.
template <bool kSmall>
MOK_DEVICE Batch count_routes(const Block& block, const Deal& deal, const Share& share) {
    const PrepareParams& params = block.params;
#pragma unroll 1
    for (uint32_t expert = block.lane; expert < block.experts; expert += ptx::kWarpThreads) {
        ptx::store_shared(block.counter(block.warp, expert), 0u);
    }
    ptx::sync_warp();
    const bool alone = block.ranks == 1;
    const bool looks_again = !kSmall && !keeps_batch(deal);
    const bool leaves_ids = alone && (!kSmall || ptx::block_idx() == 0);
    const uint32_t step = params.round_slots.divisor;
    const char* ids = alone ? static_cast<const char*>(params.topk_ids)
                            : window_of(params.group, share.rank) + params.ids_offset;
    int32_t* copies = params.arrays.ids + slots_of(block, share.rank);
    uint32_t* masks = params.arrays.round_masks + static_cast<int64_t>(share.rank) * params.most_rounds;
    // No slot behind the rank's last or the warp's last round, and none in lanes that rounds leave out.
    uint32_t end_slot = share.end * step < share.slots ? share.end * step : share.slots;
    if (block.lane >= step) end_slot = 0;
    Batch routes, last{};
#pragma unroll
    for (uint32_t i = 0; i < kBatchRounds; ++i) routes.word[i] = kNoRoute;
#pragma unroll 1
    for (uint32_t ahead = share.round;; ahead += kBatchRounds) {
        // The next ids are on their way while the last ones are numbered.
        const uint32_t slot = ahead * step + block.lane;
        Batch next{};
        if (ahead < share.end) next = load_ids(ids, alone && params.ids_are_int64, slot, end_slot, step);
        if (ahead > share.round) {
            const uint32_t round = ahead - kBatchRounds;
            const uint32_t count = share.end - round < kBatchRounds ? share.end - round : kBatchRounds;
#pragma unroll 1
            for (uint32_t i = 0; i < count; ++i) {
                const uint32_t id = last.get(i), at = slot - (kBatchRounds - i) * step;
                const uint32_t expert = expert_of(block, id);
                const uint32_t lanes = ptx::ballot(expert != kNoRoute);
                if (leaves_ids ? at < end_slot : looks_again && expert != kNoRoute) {
                    const bool is_id = id < static_cast<uint32_t>(params.plan.num_experts);
                    ptx::store_global(copies + at, is_id ? static_cast<int32_t>(id) : -1);
                }
                if (looks_again && block.lane == 0) ptx::store_global(masks + round + i, lanes);
                if (lanes == 0) continue;
                const uint32_t number = take_number(block, lanes, expert);
                if (expert != kNoRoute) routes.set(i, pack_route(expert, number));
            }
        }
        if (ahead >= share.end) break;
        last = next;
    }
    return routes;
}

/// The warps' counters become the block's prefixes over its warps; the sums go to block_counts, or are the
/// totals already.
template <bool kSmall>
MOK_DEVICE void publish_counts(const Block& block) {
    ptx::sync_block();
#pragma unroll 1
    for (uint32_t expert = block.thread; expert < block.experts; expert += block.threads()) {
        constexpr uint32_t kWarpsAtATime = 8;
        uint32_t sum = 0;
#pragma unroll 1
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
        if constexpr (kSmall) {
            Block::set_entry(block.shared.total, expert, sum);
            Block::set_entry(block.shared.base, expert, 0);
        } else {
            const int64_t row = static_cast<int64_t>(expert) * block.params.count_stride;
            ptx::store_global(block.params.arrays.block_counts + row + ptx::block_idx(), sum);
        }
    }
}

}  // namespace mok::prepare
