// The preparation of a call on the device: from the published ids of all ranks to what the megakernel takes
// (csrc/schedule/prepared.h), equal to build_plan and HostSchedule bit for bit. Integers only, and no sum
// depends on who comes first.
//
//   row of (t, k) = segment_begin[e] + number of earlier routes of expert e, in the order (source rank, slot)
//
// One cooperative launch; some blocks have rounds of routes, the next one makes the table, the rest leave.
//
//   blocks with a part                        | the table's block
//   count_routes: all ids, counts per expert  | headers compared, ranks' inputs
//   --- grid barrier (counts) ---
//   scan_segments, place_routes: rows         | scan_segments, make_table: chunks, pieces
//   --- grid barrier (rows) ---
//   write_units: the pull list                | finish_table: runs, unit_begin, totals
//
// A launch of one block does both, in this order. How many blocks have a part follows from the ranks' token
// counts, which are data, so a captured launch is right for any routing. In a small call every block counts
// and places all routes, in its shared memory, and block barriers take the place of the grid's.
//
// Ordering: ids and headers were written before the first barrier between ranks, which an earlier kernel of
// the stream has passed, or block 0 of this one, before a grid barrier. Everything that blocks exchange is
// written before a grid barrier and read behind it, but for tile_counts, which are added to relaxed between
// the two. The megakernel starts behind this kernel in stream order.
//
// Ends: a workspace that has ended makes the kernel return at once; one that ends while blocks wait makes
// them leave. Only a block whose own time was up traps.
#pragma once

#include "csrc/comm/device/grid_barrier.cuh"
#include "csrc/comm/device/peer_barrier.cuh"
#include "csrc/kernels/prepare_table.cuh"
#include "csrc/kernels/publish.cuh"

namespace mok {

namespace prepare {

/// False: leave, with the trap done where one is due.
MOK_DEVICE bool meet(const PrepareParams& params, uint32_t blocks, PreparePlace place) {
    ptx::Deadline deadline(params.limits, static_cast<uint32_t>(place));
    if (grid_barrier(params.barrier, blocks, deadline)) return true;
    if (deadline.timed_out) ptx::trap_recorded(params.limits);
    return false;
}

/// What publish_kernel does, by block 0; the others wait for it. False: leave.
MOK_DEVICE bool publish_and_meet(const Block& block) {
    const PrepareParams& params = block.params;
    if (ptx::block_idx() == 0) {
        publish_inputs(params.group, params.published, block.thread, block.threads());
        ptx::sync_block();
        const PeerOutcome outcome = peer_barrier(params.group, PeerPhase::kInputs);
        if (outcome == PeerOutcome::kExpired && block.thread == 0) ptx::trap();
    }
    return meet(params, ptx::num_blocks(), PreparePlace::kPublished);
}

/// Counts and rows of all routes in each block, its share of the tiles behind them.
MOK_DEVICE void prepare_small(const Block& block, const SharedRows& rows, const Deal& deal, bool has_table) {
    rows.clear_counts(1);
    const Share share = make_share<true>(block, deal);
    const Batch routes = count_routes<true>(block, deal, share);
    publish_counts<true>(block);
    if (has_table) {
        if (block.warp == 0 && block.ranks > 1) compare_headers(block);
        write_ranks(block);
    }
    stamp(block, PrepareStamp::kCounted);
    stamp(block, PrepareStamp::kMetCounts);
    scan_segments(block, deal);  // looks first at the totals that the same threads have written
    stamp(block, PrepareStamp::kScanned);
    place_routes<true>(block, rows, deal, share, routes);
    count_zero_units(block, rows);
    stamp(block, PrepareStamp::kPlaced);
    ptx::sync_block();
    stamp(block, PrepareStamp::kMetRows);
    if (deal.has_part()) {
        clear_counters(block, deal);
        write_units(block, rows, deal);
    }
    if (has_table) finish_table(block, rows, make_table(block));
}

/// The work of the table at the top of this file.
MOK_DEVICE void prepare_large(const Block& block, const GlobalRows& rows, const Deal& deal, bool has_table) {
    const uint32_t blocks = deal.meeting_blocks();
    Share share{0, 0, 0, 0};
    Batch routes{};
    rows.clear_counts(blocks);
    if (deal.has_part()) {
        share = make_share<false>(block, deal);
        routes = count_routes<false>(block, deal, share);
        publish_counts<false>(block);
    }
    if (has_table) {
        if (block.warp == 0 && block.ranks > 1) compare_headers(block);
        write_ranks(block);
    }
    stamp(block, PrepareStamp::kCounted);
    if (!meet(block.params, blocks, PreparePlace::kCounts)) return;
    stamp(block, PrepareStamp::kMetCounts);

    sum_block_counts(block, deal);
    scan_segments(block, deal);
    stamp(block, PrepareStamp::kScanned);
    schedule::Table table{};
    if (deal.has_part()) {
        place_routes<false>(block, rows, deal, share, routes);
        clear_counters(block, deal);
    }
    if (has_table) {
        count_zero_units(block, rows);
        table = make_table(block);
    }
    stamp(block, PrepareStamp::kPlaced);
    if (!meet(block.params, blocks, PreparePlace::kRows)) return;
    stamp(block, PrepareStamp::kMetRows);

    if (deal.has_part()) write_units(block, rows, deal);
    if (has_table) finish_table(block, rows, table);
}

}  // namespace prepare

template <bool kSmall>
__global__ void __launch_bounds__(kPrepareMaxWarps* ptx::kWarpThreads, 1)
    prepare_kernel(const __grid_constant__ PrepareParams params) {
    using namespace prepare;
    const Block block = make_block<kSmall>(params);
    stamp(block, PrepareStamp::kStart);
    if (block.warp == 1) touch_parameters(block);
    if (kSmall && params.publishes && !publish_and_meet(block)) return;
    const Deal deal = deal_rounds<kSmall>(block);
    if (deal.ended || ptx::block_idx() >= deal.meeting_blocks()) return;
    const bool has_table = ptx::block_idx() == deal.table_block();
    stamp(block, PrepareStamp::kDealt);
    if constexpr (kSmall) {
        prepare_small(block, SharedRows{block}, deal, has_table);
    } else {
        prepare_large(block, GlobalRows{block}, deal, has_table);
    }
    stamp(block, PrepareStamp::kEnd);
}

}  // namespace mok
