// Pass 2 of the preparation: segments and chunks from everyone's counts, then each route to its row.
//
// A route's row is its block's first row of the expert, plus the expert's routes in earlier warps of the
// block, plus its number in the warp. All routes of a token lie in one round, so its lanes compare their
// rows: that sorts the token's rows, and tells which of them is the first of its chunk, a unit's first row.
#pragma once

#include "csrc/kernels/prepare_count.cuh"

namespace mok::prepare {

/// Sums block_counts: `total` over all blocks, `base` over those before this one. Both are zero before.
MOK_DEVICE void sum_block_counts(const Block& block, const Deal& deal) {
    const uint32_t parts = block.threads() > block.experts ? block.threads() / block.experts : 1;
    for (uint32_t i = block.thread; i < parts * block.experts; i += block.threads()) {
        const uint32_t expert = i % block.experts;
        uint32_t total = 0, before = 0;
#pragma unroll 8
        for (uint32_t other = i / block.experts; other < deal.blocks; other += parts) {
            const uint32_t count = ptx::load_global(block.params.arrays.block_counts +
                                                    static_cast<int64_t>(other) * block.experts + expert);
            total += count;
            before += other < ptx::block_idx() ? count : 0;
        }
        ptx::red_relaxed_cta_shared_add(block.shared.total + 4 * expert, total);
        ptx::red_relaxed_cta_shared_add(block.shared.base + 4 * expert, before);
    }
    ptx::sync_block();
}

/// Rows of the ring; a longer one than the plan can have is the same.
MOK_DEVICE uint32_t ring_rows(const Block& block) {
    const int64_t rows = static_cast<int64_t>(block.params.shape.ring_blocks) * block.block_m;
    constexpr int64_t kMost = int64_t{1} << 31;
    return static_cast<uint32_t>(rows < kMost ? rows : kMost);
}

/// The chunk of a row of an expert: a segment that fits into the ring lies in one; a longer one starts a
/// chunk and is cut at multiples of the ring.
MOK_DEVICE uint32_t chunk_of(const Block& block, uint32_t expert, uint32_t row) {
    return Block::entry(block.shared.chunk, expert) +
           (row - Block::entry(block.shared.begin, expert)) / ring_rows(block);
}

/// One warp: in which chunk each segment starts, how many chunks there are, and where the first one ends. The
/// rule is mok::chunk_end's.
MOK_DEVICE void find_chunks(const Block& block, uint32_t num_rows) {
    const uint32_t ring = ring_rows(block);
    uint32_t chunk = 0, first_end = 0, segment = 0;
    for (uint32_t begin = 0; begin < num_rows; ++chunk) {
        const uint32_t limit = begin + ring;
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
                ptx::store_shared(block.shared.chunk + 4 * expert, chunk);
            }
            segment += num_fitting;
            fits = num_fitting == ptx::kWarpThreads;
        }
        const uint32_t next = segment < block.experts ? Block::entry(block.shared.begin, segment) : num_rows;
        begin = next > begin ? next : limit;
        if (chunk == 0) first_end = begin;
    }
    if (block.lane == 0) {
        block.set_word(SharedWord::kNumChunks, chunk);
        const bool is_cut = block.params.shape.sizes.pass == schedule::Pass::kRecompute;
        block.set_word(SharedWord::kTaskRows, is_cut ? first_end : num_rows);
    }
    ptx::sync_warp();
}

/// Segment starts from the padded totals, and chunks; `base` becomes this block's first row of each expert.
/// The table's block writes segment_begin and counts.
MOK_DEVICE void scan_segments(const Block& block, const Deal& deal) {
    const PrepareArrays& arrays = block.params.arrays;
    const bool writes = ptx::block_idx() == deal.table_block();
    uint32_t before = 0;
    for (uint32_t first = 0; first < block.experts; first += block.threads()) {
        const uint32_t expert = first + block.thread;
        const bool is_expert = expert < block.experts;
        const uint32_t total = is_expert ? Block::entry(block.shared.total, expert) : 0;
        const Prefix rows = block_prefix(block, round_up(total, block.block_m));
        if (is_expert) {
            const uint32_t begin = before + rows.before;
            const uint32_t base = block.shared.base + 4 * expert;
            ptx::store_shared(block.shared.begin + 4 * expert, begin);
            ptx::store_shared(block.shared.chunk + 4 * expert, 0u);
            ptx::store_shared(base, ptx::load_shared<uint32_t>(base) + begin);
            if (writes) {
                ptx::store_global(arrays.segment_begin + expert, static_cast<int64_t>(begin));
                ptx::store_global(arrays.counts + expert, static_cast<int64_t>(total));
            }
        }
        before += rows.total;
    }
    if (block.thread == 0) {
        ptx::store_shared(block.shared.begin + 4 * block.experts, before);
        block.set_word(SharedWord::kRows, before);
        block.set_word(SharedWord::kTaskRows, before);
        block.set_word(SharedWord::kNumChunks, before > 0 ? 1 : 0);
        if (writes) ptx::store_global(arrays.segment_begin + block.experts, static_cast<int64_t>(before));
    }
    ptx::sync_block();
    if (before > ring_rows(block)) {
        if (block.warp == 0) find_chunks(block, before);
        ptx::sync_block();
    }
}

/// Where, in each segment, the rows of this rank's own tokens begin and end: pull units turn at them. The
/// warps' counters are still the prefixes of pass 1.
MOK_DEVICE void write_own_rows(const Block& block, const Deal& deal) {
    const uint32_t rank = static_cast<uint32_t>(block.params.plan.rank);
    for (uint32_t side = 0; side < 2; ++side) {
        const uint32_t source = rank + side;  // the first one whose rows come behind
        const uint32_t warp = source == 0 ? 0 : Block::entry(block.shared.warps_end, source - 1);
        const bool is_used = warp < deal.used_warps;
        if (ptx::block_idx() != (is_used ? warp / block.warps : 0)) continue;
        for (uint32_t expert = block.thread; expert < block.experts; expert += block.threads()) {
            const uint32_t row =
                is_used ? Block::entry(block.shared.base, expert) +
                              ptx::load_shared<uint32_t>(block.counter(warp % block.warps, expert))
                        : Block::entry(block.shared.begin, expert) + Block::entry(block.shared.total, expert);
            ptx::store_global(block.params.arrays.own_rows + side * block.experts + expert, row);
        }
    }
}

/// The routes of one round go to their rows (kNoRow: none). A whole warp calls it.
MOK_DEVICE void place_round(const Block& block, uint32_t rank, uint32_t slot, uint32_t expert, uint32_t row) {
    const PrepareArrays& arrays = block.params.arrays;
    const bool is_route = row != kNoRow;
    if (!block.params.pulls_any) {
        if (is_route) {
            const RowRecord record = RowRecord::make(slot, rank, 0, 0);
            ptx::store_global(arrays.records + row, uint64_t{record.packed} << 32 | record.slot);
        }
        return;
    }
    const uint32_t choice = block.lane % block.top_k;
    const uint32_t token_lane = block.lane - choice;
    const bool one_chunk = block.word(SharedWord::kNumChunks) == 1;
    const uint32_t chunk = one_chunk || !is_route ? 0 : chunk_of(block, expert, row);
    uint32_t index = 0;   // the token's rows before this one,
    uint32_t before = 0;  // those of them in the same chunk,
    uint32_t count = 0;   // and all its rows there
#pragma unroll 4
    for (uint32_t k = 0; k < block.top_k; ++k) {
        const uint32_t other = ptx::shuffle(row, token_lane + k);
        const uint32_t other_chunk = one_chunk ? 0 : ptx::shuffle(chunk, token_lane + k);
        const bool is_same = other != kNoRow && other_chunk == chunk;
        index += other < row ? 1 : 0;
        before += is_same && other < row ? 1 : 0;
        count += is_same ? 1 : 0;
    }
    if (!is_route) return;
    const bool is_first = before == 0;
    const RowRecord record = RowRecord::make(slot, rank, index, is_first ? count : 0);
    ptx::store_global(arrays.records + row, uint64_t{record.packed} << 32 | record.slot);
    ptx::store_global(arrays.token_rows + slot_place(block, rank, slot - choice + index),
                      static_cast<int32_t>(row));
    if (is_first) {
        ptx::red_relaxed_gpu_add(arrays.tile_counts + row / kTileRows, uint64_t{1} << 32 | count);
    }
}

MOK_DEVICE uint32_t row_of(const Block& block, int32_t expert, uint32_t number) {
    if (expert < 0) return kNoRow;
    return Block::entry(block.shared.base, static_cast<uint32_t>(expert)) + number;
}

/// Rounds that pass 1 kept: their numbers count from 0.
MOK_DEVICE void place_batch(const Block& block, const Share& share, const Batch& batch) {
#pragma unroll
    for (uint32_t i = 0; i < kBatchRounds; ++i) {
        if (share.round + i >= share.end) break;
        const int32_t expert = batch.expert[i];
        uint32_t row = row_of(block, expert, batch.number[i]);
        const uint32_t index = expert < 0 ? 0 : static_cast<uint32_t>(expert);
        if (expert >= 0) row += ptx::load_shared<uint32_t>(block.counter(block.warp, index));
        place_round(block, share.rank, batch.slot[i], index, row);
    }
}

/// Rounds that pass 1 did not keep: those with a row here are numbered again, from the counters on.
MOK_DEVICE void place_again(const Block& block, const Share& share) {
    const PrepareArrays& arrays = block.params.arrays;
    const int64_t most = rounds_of(block.params.plan.max_tokens, block.params.plan.top_k);
    const uint32_t* masks = arrays.round_masks + static_cast<int64_t>(share.rank) * most;
    for (uint32_t first = share.round; first < share.end; first += ptx::kWarpThreads) {
        const uint32_t own =
            first + block.lane < share.end ? ptx::load_global(masks + first + block.lane) : 0;
        for (uint32_t left = ptx::ballot(own != 0); left != 0;) {
            uint32_t slot[kBatchRounds], routes[kBatchRounds];
            int32_t expert[kBatchRounds];
#pragma unroll
            for (uint32_t i = 0; i < kBatchRounds; ++i) {
                const uint32_t round = ptx::popcount((left & (~left + 1)) - 1) % ptx::kWarpThreads;
                const uint32_t mask = ptx::shuffle(own, round);
                routes[i] = left != 0 ? mask : 0;
                slot[i] = (first + round) * block.round_slots + block.lane;
                expert[i] = -1;
                if ((routes[i] >> block.lane & 1) != 0) {
                    const int32_t id = ptx::load_global(arrays.ids + slot_place(block, share.rank, slot[i]));
                    expert[i] = local_expert(id, block.params.plan);
                }
                left &= left - 1;
            }
#pragma unroll
            for (uint32_t i = 0; i < kBatchRounds; ++i) {
                if (routes[i] == 0) break;
                const uint32_t number = take_number(block, routes[i], expert[i]);
                place_round(block, share.rank, slot[i], static_cast<uint32_t>(expert[i]),
                            row_of(block, expert[i], number));
            }
        }
    }
}

MOK_DEVICE void place_routes(const Block& block, const Deal& deal, const Share& share, const Batch& batch) {
    if (block.ranks > 1) write_own_rows(block, deal);
    if (keeps_batch(deal)) {
        place_batch(block, share, batch);
        return;
    }
    ptx::sync_block();  // own_rows are written from the counters that now change
    place_again(block, share);
}

}  // namespace mok::prepare
