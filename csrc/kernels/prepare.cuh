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
//   --- barrier (counts) ---
//   scan_segments, place_routes: rows         | scan_segments, make_table: chunks, pieces, runs
//   --- barrier (rows) ---
//   write_units: the pull list                | finish_table: unit_begin, pulls, totals
//
// A launch of one block does both, in this order. How many blocks have a part follows from the ranks' token
// counts, which are data, so a captured launch is right for any routing. A small call is one cluster, whose
// barrier costs a fraction of a grid's, and which publishes and meets the peers itself.
//
// Ordering: ids and headers were written before the first barrier between ranks, which an earlier kernel of
// the stream has passed, or this one: then all blocks publish, meet, block 0 meets the peers, all meet again.
// Everything that blocks exchange is written before a barrier of theirs and read behind it, but for
// tile_counts, which are added to relaxed between the two. The megakernel starts behind this kernel.
//
// Ends: a workspace that has ended makes the kernel return without work; one that ends while blocks wait
// makes them leave. Only a block whose own time was up traps.
#pragma once

#include "csrc/comm/device/grid_barrier.cuh"
#include "csrc/comm/device/peer_barrier.cuh"
#include "csrc/kernels/prepare_table.cuh"
#include "csrc/kernels/publish.cuh"

namespace mok {

namespace prepare {

/// False: leave, with the trap done where one is due.
MOK_DEVICE bool meet(const Block& block, const Deal& deal, PreparePlace place) {
    if (block.params.is_cluster) {
        ptx::sync_cluster();
        return true;
    }
    ptx::Deadline deadline(block.params.limits, static_cast<uint32_t>(place));
    if (grid_barrier(block.params.barrier, deal.meeting_blocks(), deadline)) return true;
    if (deadline.timed_out) ptx::trap();
    return false;
}

/// What publish_kernel does, by one cluster.
MOK_DEVICE void publish_and_meet(const Block& block) {
    const PrepareParams& params = block.params;
    publish_inputs(params.group, params.published,
                   static_cast<int64_t>(ptx::block_idx()) * block.threads() + block.thread,
                   static_cast<int64_t>(ptx::num_blocks()) * block.threads());
    ptx::sync_cluster();
    if (ptx::block_idx() == 0) {
        const PeerOutcome outcome = peer_barrier(params.group, PeerPhase::kInputs);
        if (outcome == PeerOutcome::kExpired && block.thread == 0) ptx::trap();
    }
    ptx::sync_cluster();
}

}  // namespace prepare

__global__ void __launch_bounds__(kPrepareMaxWarps* ptx::kWarpThreads, 1)
    prepare_kernel(const __grid_constant__ PrepareParams params) {
    using namespace prepare;
    const Block block = make_block(params);
    stamp(block, PrepareStamp::kStart);
    if (block.warp == 1) touch_parameters(block);
    if (params.publishes) publish_and_meet(block);
    const Deal deal = deal_rounds(block);
    if (deal.ended && params.is_cluster) {  // who sees it and who does not yet must both pass two barriers
        ptx::sync_cluster();
        ptx::sync_cluster();
    }
    if (deal.ended || ptx::block_idx() >= deal.meeting_blocks()) return;
    const bool has_table = ptx::block_idx() == deal.table_block();
    stamp(block, PrepareStamp::kDealt);

    Share share{0, 0, 0, 0};
    Batch routes{};
    clear_tile_counts(block, deal);
    if (deal.has_part()) {
        share = make_share(block, deal);
        routes = count_routes(block, deal, share);
        publish_counts(block);
    }
    if (has_table) {
        if (block.warp == 0 && block.ranks > 1) compare_headers(block);
        write_ranks(block);
    }
    stamp(block, PrepareStamp::kCounted);
    if (!meet(block, deal, PreparePlace::kCounts)) return;
    stamp(block, PrepareStamp::kMetCounts);

    sum_block_counts(block, deal);
    scan_segments(block, deal);
    stamp(block, PrepareStamp::kScanned);
    schedule::Table table{};
    if (deal.has_part()) {
        place_routes(block, deal, share, routes);
        clear_counters(block, deal);
    }
    if (has_table) {
        count_zero_units(block);
        table = make_table(block);
    }
    stamp(block, PrepareStamp::kPlaced);
    if (!meet(block, deal, PreparePlace::kRows)) return;
    stamp(block, PrepareStamp::kMetRows);

    if (deal.has_part()) write_units(block, deal);
    if (has_table) finish_table(block, table);
    stamp(block, PrepareStamp::kEnd);
}

}  // namespace mok
