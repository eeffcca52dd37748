// Pass 2 of the preparation: segments and chunks from everyone's counts, then each route to its row.
//
// A route's row is its block's first row of the expert, plus the expert's routes in earlier warps of the
// block, plus its number in the warp. All routes of a token lie in one round, so its lanes compare their
// rows: that sorts the token's rows, and tells which of them is the first of its chunk, a unit's first row.
#pragma once

#include "csrc/kernels/prepare_count.cuh"

namespace mok::prepare {

/// Sums block_counts: `total` over all blocks, `base` over those before this one. A group of threads sums for
/// one expert, four blocks a thread at a time, a few of which are on their way at once.
MOK_DEVICE void sum_block_counts(const Block& block, const Deal& deal) {
    constexpr uint32_t kAtATime = 3;
    const uint32_t quads = ceil_div(deal.blocks, 4u);
    uint32_t log = 0;  // of the group's threads: enough groups for all experts, if there can be
    while ((block.experts << (log + 1)) <= block.threads() && (1u << log) < quads && log < 5) ++log;
    const uint32_t index = block.thread & ((1u << log) - 1);
#pragma unroll 1
    for (uint32_t first = 0; first < block.experts; first += block.threads() >> log) {
        const uint32_t expert = first + (block.thread >> log);
        const uint32_t end = expert < block.experts ? quads : 0;
        const uint32_t* counts =
            block.params.arrays.block_counts + static_cast<int64_t>(expert) * block.params.count_stride;
        uint32_t total = 0, before = 0;
#pragma unroll 1
        for (uint32_t quad = index; quad < end; quad += kAtATime << log) {
            ptx::Words4 words[kAtATime] = {};
#pragma unroll
            for (uint32_t i = 0; i < kAtATime; ++i) {
                const uint32_t at = quad + (i << log);
                if (at < end) words[i] = ptx::load_global_v4_hint(counts + 4 * at, ptx::kEvictNormal);
            }
#pragma unroll
            for (uint32_t i = 0; i < 4 * kAtATime; ++i) {
                const uint32_t other = 4 * (quad + (i / 4 << log)) + i % 4;
                const uint32_t count = other < deal.blocks ? words[i / 4].word[i % 4] : 0;
                total += count;
                before += other < ptx::block_idx() ? count : 0;
            }
        }
#pragma unroll 1
        for (uint32_t distance = 1u << log >> 1; distance > 0; distance >>= 1) {
            total += ptx::shuffle_xor(total, distance);
            before += ptx::shuffle_xor(before, distance);
        }
        if (index == 0 && expert < block.experts) {
            Block::set_entry(block.shared.total, expert, total);
            Block::set_entry(block.shared.base, expert, before);
        }
    }
    ptx::sync_block();
}

/// The chunk of a row of an expert: a segment that fits into the ring lies in one; a longer one starts a
/// chunk and is cut at multiples of the ring.
MOK_DEVICE uint32_t chunk_of(const Block& block, uint32_t expert, uint32_t row) {
    return Block::entry(block.shared.chunk, expert) +
           block.params.ring_rows.divide(row - Block::entry(block.shared.begin, expert));
}

/// One warp: in which chunk each segment starts, and the chunks. The rule is mok::chunk_end's.
MOK_DEVICE void find_chunks(const Block& block, uint32_t num_rows, bool writes) {
    const Divisor& block_rows = block.params.block_rows;
    uint32_t chunk = 0, cuts = 0, segment = 0, task_rows = num_rows;
    bool is_inside = false;  // the chunk starts inside a segment
#pragma unroll 1
    for (uint32_t begin = 0; begin < num_rows; ++chunk) {
        const uint32_t limit = begin + block.params.ring_rows.divisor;
#pragma unroll 1
        for (bool fits = true; fits && segment < block.experts;) {
            const uint32_t candidate = segment + block.lane;
            const bool is_expert = candidate < block.experts;
            const uint32_t expert = is_expert ? candidate : block.experts - 1;
            const uint32_t from = Block::entry(block.shared.begin, expert);
            const bool ends_here = is_expert && Block::entry(block.shared.begin, expert + 1) <= limit;
            const uint32_t num_fitting = ptx::popcount(ptx::ballot(ends_here));
            // A segment that fits, but for the rest of a cut one, or a cut one that starts the chunk: each
            // entry is written once.
            const bool starts_cut = is_expert && block.lane == num_fitting && from == begin;
            if ((ends_here && from >= begin) || starts_cut) {
                Block::set_entry(block.shared.chunk, expert, chunk);
            }
            segment += num_fitting;
            fits = num_fitting == ptx::kWarpThreads;
        }
        const uint32_t next = segment < block.experts ? Block::entry(block.shared.begin, segment) : num_rows;
        const bool ends_inside = next <= begin;
        const uint32_t end = ends_inside ? limit : next;
        const bool is_cut = is_inside || ends_inside;
        const bool has_tasks = chunk == 0 || !block.params.is_recompute;
        if (has_tasks && writes && block.lane == 0) {
            block.params.arrays.chunks[chunk] = schedule::Chunk{
                static_cast<int32_t>(block_rows.divide(begin)), static_cast<int32_t>(block_rows.divide(end)),
                is_cut ? static_cast<int32_t>(cuts) : -1};
        }
        if (has_tasks) {
            task_rows = end;
            cuts += is_cut ? 1 : 0;
        }
        is_inside = ends_inside;
        begin = end;
    }
    if (block.lane == 0) {
        block.set_word(SharedWord::kRows, num_rows);
        block.set_word(SharedWord::kTaskRows, task_rows);
        block.set_word(SharedWord::kChunks, chunk);
        block.set_word(SharedWord::kCuts, cuts);
    }
}

/// Segment starts from the padded totals, and chunks; `base` becomes this block's first row of each expert.
/// The table's block writes them down.
MOK_DEVICE void scan_segments(const Block& block, const Deal& deal) {
    const PrepareArrays& arrays = block.params.arrays;
    const bool writes = ptx::block_idx() == deal.table_block();
    uint32_t before = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < block.experts; first += block.threads()) {
        const uint32_t expert = first + block.thread;
        const bool is_expert = expert < block.experts;
        const uint32_t total = is_expert ? Block::entry(block.shared.total, expert) : 0;
        const Divisor& block_rows = block.params.block_rows;
        const Prefix<1> rows = block_prefix<1>(block, {block_rows.divide_up(total) * block_rows.divisor});
        if (is_expert) {
            const uint32_t begin = before + rows.before[0];
            Block::set_entry(block.shared.begin, expert, begin);
            Block::set_entry(block.shared.base, expert, Block::entry(block.shared.base, expert) + begin);
            if (writes) {
                ptx::store_global(arrays.segment_begin + expert, static_cast<int64_t>(begin));
                ptx::store_global(arrays.counts + expert, static_cast<int64_t>(total));
            }
        }
        before += rows.total[0];
    }
    if (block.thread == 0) {
        Block::set_entry(block.shared.begin, block.experts, before);
        if (writes) ptx::store_global(arrays.segment_begin + block.experts, static_cast<int64_t>(before));
    }
    ptx::sync_block();
    if (block.warp == 0) find_chunks(block, before, writes);
    ptx::sync_block();
}

MOK_DEVICE Turn turn_of(const Block& block, uint32_t rank) {
    const uint32_t own = static_cast<uint32_t>(block.params.plan.rank);
    return rank == own ? Turn::kOwn : rank > own ? Turn::kBehind : Turn::kBefore;
}

/// The routes of one round go to their rows (kNoRow: none). A whole warp calls it.
template <typename Rows>
MOK_DEVICE void place_round(const Block& block, const Rows& rows, const Share& share, uint32_t round,
                            uint32_t expert, uint32_t row) {
    const PrepareParams& params = block.params;
    const uint32_t slot = round * params.round_slots.divisor + block.lane;
    const bool is_route = row != kNoRow;
    const uint32_t top_k = params.top_k.divisor;
    const uint32_t choice = params.top_k.remainder(block.lane);
    const uint32_t token_lane = block.lane - choice;
    uint32_t index = 0;   // the token's rows before this one,
    uint32_t before = 0;  // those of them in the same chunk,
    uint32_t count = 1;   // and all its rows there
    const uint32_t token_routes = ptx::ballot(is_route) >> token_lane & (0xffffffffu >> (32 - top_k));
    if (ptx::any_lane(is_route && ptx::popcount(token_routes) > 1)) {
        const bool one_chunk = block.word(SharedWord::kChunks) == 1;
        const uint32_t chunk = one_chunk || !is_route ? 0 : chunk_of(block, expert, row);
        count = 0;
#pragma unroll 2
        for (uint32_t k = 0; k < top_k; ++k) {
            const uint32_t other = ptx::shuffle(row, token_lane + k);
            const uint32_t other_chunk = one_chunk ? 0 : ptx::shuffle(chunk, token_lane + k);
            const bool is_same = other != kNoRow && other_chunk == chunk;
            index += other < row ? 1 : 0;
            before += is_same && other < row ? 1 : 0;
            count += is_same ? 1 : 0;
        }
    }
    if (!is_route) return;
    const bool is_first = params.pulls_any && before == 0;
    rows.set_record(row, RowRecord::make(slot, share.rank, index, is_first ? count : 0));
    rows.set_token_row(share.rank, slot - choice + index, row);
    if (is_first) rows.add_unit(row / kTileRows, turn_of(block, share.rank), count);
}

/// The rounds of a warp that have a row here, by the masks of pass 1.
struct RoundsAgain {
    const uint32_t* masks;  // of the rank
    const int32_t* ids;
    uint32_t ahead;  // the next group of 32 rounds
    uint32_t group;  // the one whose masks the lanes hold
    uint32_t mask;   // this lane's
    uint32_t left;   // rounds of the group that are to come

    /// Moves to the next round, share.end: none. Its `lanes` have a row here, and this one's id is loaded.
    MOK_DEVICE uint32_t next(const Block& block, const Share& share, uint32_t& lanes, uint32_t& id) {
        while (left == 0 && ahead < share.end) {
            group = ahead;
            ahead += ptx::kWarpThreads;
            const bool is_round = group + block.lane < share.end;
            mask = is_round ? ptx::load_global(masks + group + block.lane) : 0;
            left = ptx::ballot(mask != 0);
        }
        lanes = 0;
        id = kNoRoute;
        if (left == 0) return share.end;
        const uint32_t index = ptx::popcount((left & (~left + 1)) - 1);
        left &= left - 1;
        lanes = ptx::shuffle(mask, index);
        const uint32_t slot = (group + index) * block.params.round_slots.divisor + block.lane;
        if ((lanes >> block.lane & 1) != 0) id = static_cast<uint32_t>(ptx::load_global(ids + slot));
        return group + index;
    }
};

/// Every route of the warp's rounds to its row: by the numbers that pass 1 kept, or numbered again. Then the
/// next round's ids are on their way while one is placed.
template <bool kSmall, typename Rows>
MOK_DEVICE void place_routes(const Block& block, const Rows& rows, const Deal& deal, const Share& share,
                             const Batch& routes) {
    const PrepareParams& params = block.params;
    const bool keeps = kSmall || keeps_batch(deal);
    RoundsAgain rounds{params.arrays.round_masks + static_cast<int64_t>(share.rank) * params.most_rounds,
                       params.arrays.ids + slots_of(block, share.rank),
                       share.round,
                       0,
                       0,
                       0};
    uint32_t ahead = share.round, round = share.end;  // none yet
    uint32_t lanes = 0, id = kNoRoute;
#pragma unroll 1
    for (;;) {
        uint32_t next = ahead, next_lanes = 0, next_id = kNoRoute;
        if (keeps) {
            if (ahead < share.end) ++ahead;
        } else {
            next = rounds.next(block, share, next_lanes, next_id);
        }
        if (round < share.end) {
            uint32_t expert, row = kNoRow;
            if (keeps) {
                const uint32_t route = routes.get(round - share.round);
                expert = route & 0xffff;
                if (route != kNoRoute) {
                    row = Block::entry(block.shared.base, expert) +
                          ptx::load_shared<uint32_t>(block.counter(block.warp, expert)) + (route >> 16);
                }
            } else {
                expert = expert_of(block, id);
                const uint32_t number = take_number(block, lanes, expert);
                if (expert != kNoRoute) row = Block::entry(block.shared.base, expert) + number;
            }
            place_round(block, rows, share, round, expert, row);
        }
        if (next >= share.end) break;
        round = next;
        lanes = next_lanes;
        id = next_id;
    }
}

}  // namespace mok::prepare
