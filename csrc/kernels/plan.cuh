// The plan on the device: a stable counting sort of all ranks' routes by local expert, equal to build_plan of
// csrc/layout/plan_host.h bit for bit. Integers only, and every sum is independent of who comes first.
//
// A round is 32 consecutive slots of one rank. Rounds in the order (source rank, slot) are dealt to warps in
// contiguous runs, so warp order is row order. One launch, two passes over the ids:
//   1. each warp counts its routes per expert in its own row of shared memory; the block turns the rows into
//      prefixes over its warps and publishes its totals;
//   --- grid barrier (none when one block does all) ---
//   2. every block sums the totals of all blocks and of those before it, scans the padded totals into segment
//      starts, and its warps go over their rounds again: a route's row is its block's first row of the expert
//      plus its warp's counter plus the number of lanes before it with the same expert. A warp with few
//      rounds has kept all but the first of these from pass 1.
// How many blocks take part follows from the ranks' token counts, which are data; the others leave at once.
#pragma once

#include "csrc/comm/device/grid_barrier.cuh"
#include "csrc/kernels/plan_rounds.cuh"

namespace mok {

namespace plan_detail {

/// Pass 1: counters become the block's prefixes over its warps; totals go to block_counts (or stay, alone).
/// Returns the warp's last batch, with numbers from 0 on.
MOK_DEVICE Batch count_routes(const Block& block, uint32_t num_rounds, uint32_t blocks) {
    for (uint32_t expert = block.lane; expert < block.experts; expert += ptx::kWarpThreads) {
        ptx::store_shared(block.counter(block.warp, expert), 0u);
    }
    ptx::sync_warp();
    Batch batch;
#pragma unroll
    for (int i = 0; i < kBatchRounds; ++i) batch.routes[i].id = -1;
    for (Rounds rounds(block, num_rounds, blocks); !rounds.is_done();) take_batch(block, rounds, batch);
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
    return batch;
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

/// The routes of a batch go to their rows, behind the block's first ones by their numbers;
/// numbers from 0 on need the warp's counter, which is the routes in earlier warps.
MOK_DEVICE void place_batch(const Block& block, const Batch& batch, bool add_counter) {
#pragma unroll
    for (int i = 0; i < kBatchRounds; ++i) {
        const Route& route = batch.routes[i];
        const int32_t expert = local_expert(route.id, block.params.shape);
        if (expert < 0) continue;
        const uint32_t index = static_cast<uint32_t>(expert);
        uint32_t row = ptx::load_shared<uint32_t>(block.shared.base + 4 * index) + batch.numbers[i];
        if (add_counter) row += ptx::load_shared<uint32_t>(block.counter(block.warp, index));
        ptx::store_global(block.params.row_peer + row, static_cast<int32_t>(route.rank));
        ptx::store_global(block.params.row_slot + row, static_cast<int32_t>(route.slot));
    }
}

/// Pass 2: every route to its row. `last` is what count_routes returned: all of the warp's rounds if they
/// fit.
MOK_DEVICE void place_routes(const Block& block, uint32_t num_rounds, uint32_t blocks, const Batch& last) {
    if (rounds_per_warp(block, num_rounds, blocks) <= kBatchRounds) {
        place_batch(block, last, true);
        return;
    }
    Batch batch;
    for (Rounds rounds(block, num_rounds, blocks); !rounds.is_done();) {
        take_batch(block, rounds, batch);
        place_batch(block, batch, false);
    }
}

}  // namespace plan_detail

__global__ void __launch_bounds__(kPlanMaxWarps* ptx::kWarpThreads, 1)
    plan_kernel(const __grid_constant__ PlanParams params) {
    using namespace plan_detail;
    const Block block = make_block(params);
    const uint32_t num_rounds = read_token_counts(block);
    const uint32_t blocks = active_blocks(block, num_rounds);
    if (ptx::block_idx() >= blocks) return;
    const Batch last = count_routes(block, num_rounds, blocks);
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
    place_routes(block, num_rounds, blocks, last);
}

}  // namespace mok
