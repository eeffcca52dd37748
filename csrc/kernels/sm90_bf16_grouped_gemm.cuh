// y[r] = rn(x[r] W_e^T) for the rows r of each segment e: a persistent grouped GEMM of the pieces in
// csrc/gemm, BF16 in and out, FP32 sums over ascending K.
//
//   warp    role                                           waits for                  signals
//   0       loader: operands of a task's K steps           task_full, stage_empty     stage_full, claim
//   1       scheduler: claims tiles, publishes tasks       claim, task_empty          task_full
//   2       store warp: staged boxes to y                  task_full, staged          staging_empty
//   3       nothing
//   4-7     consumers of rows 0-63                         task_full, stage_full,     stage_empty, staged
//   8-11    consumers of rows 64-127                         staging_empty
//
// Tiles are numbered segment by segment, in each as swizzled_tile says, and claimed from one counter, so the
// kernel ends with any number of resident blocks. Segments start at multiples of 128 rows; rows that pad one
// are multiplied as they lie where their 64-row half has a valid row, and not written otherwise.
//
// Order: everything read was written before the kernel. TMA completes on stage_full; a stage is refilled
// after wgmma_wait by all consumer warps (stage_empty). stmatrix, fence.proxy.async, staged, TMA store;
// staging is rewritten after wait_group.read (staging_empty).
#pragma once

#include "csrc/gemm/sm90_block.cuh"
#include "csrc/gemm/sm90_mainloop.cuh"
#include "csrc/gemm/sm90_staging.cuh"
#include "csrc/gemm/sm90_task.cuh"
#include "csrc/layout/plan.h"
#include "csrc/schedule/tasks.h"

namespace mok {

struct GroupedGemmParams {
    ptx::TensorMap x;              // [rows, K], boxes of 64 rows
    ptx::TensorMap weights;        // [experts, N, K], boxes of 128 rows
    ptx::TensorMap y;              // [rows, N], boxes of 64 rows
    const int64_t* segment_begin;  // [experts + 1], multiples of 128
    const int64_t* counts;         // [experts] valid rows
    uint64_t* claim;               // 0 before and after
    int32_t num_experts;
    int32_t columns;  // N
    int32_t k_steps;
    int32_t group_m;
    ptx::WaitLimits limits;
};

namespace grouped_gemm_detail {

using namespace sm90;

enum class Place : uint32_t { kLoader = 1, kScheduler = 2, kStore = 3, kConsumer = 4 };

MOK_DEVICE ptx::Deadline deadline_at(const GroupedGemmParams& params, Place place) {
    return ptx::Deadline(params.limits, static_cast<uint32_t>(place));
}

MOK_DEVICE int32_t column_tiles(const GroupedGemmParams& params) {
    return ceil_div(params.columns, static_cast<int32_t>(kTileN));
}

MOK_DEVICE uint64_t num_tiles(const GroupedGemmParams& params) {
    return static_cast<uint64_t>(params.segment_begin[params.num_experts] / kTileM * column_tiles(params));
}

MOK_DEVICE TileTask decode_tile(const GroupedGemmParams& params, uint64_t index) {
    constexpr int64_t kM = kTileM;
    TileTask task{};
    task.kind = kExitTask;
    if (index >= num_tiles(params)) return task;
    const int32_t num_n = column_tiles(params);
    const int64_t row = static_cast<int64_t>(index) / num_n * kM;
    const int32_t expert = find_segment(row, params.segment_begin, params.num_experts);
    const int64_t begin = params.segment_begin[expert], end = params.segment_begin[expert + 1];
    const schedule::Tile tile =
        schedule::swizzled_tile(static_cast<int64_t>(index) - begin / kM * num_n,
                                static_cast<int32_t>((end - begin) / kM), num_n, params.group_m);
    const int64_t valid = params.counts[expert] - tile.m * kM;
    task.kind = 0;
    task.valid_rows = static_cast<int32_t>(valid < kM ? valid : kM);
    task.expert = expert;
    task.row = static_cast<int32_t>(begin + tile.m * kM);
    task.column = tile.n * static_cast<int32_t>(kTileN);
    return task;
}

MOK_DEVICE bool run_scheduler(const GroupedGemmParams& params, const Shared& shared) {
    ptx::Deadline deadline = deadline_at(params, Place::kScheduler);
    TaskCursor cursor;
    StagingCursor claim;
    for (;;) {
        if (!ptx::mbar_wait(shared.claim(), claim.parity ^ 1, deadline)) break;  // at once for the first
        claim.next();
        const uint64_t index = ptx::atom_relaxed_gpu_add(params.claim, uint64_t{1});
        const TileTask task = decode_tile(params, index);
        if (index + 1 == num_tiles(params) + ptx::num_blocks()) {
            ptx::st_relaxed_gpu(params.claim, uint64_t{0});  // nobody claims after this one
        }
        if (!publish_task(shared, cursor, task, deadline) || task.kind == kExitTask) break;
    }
    return deadline.expired;
}

MOK_DEVICE bool run_loader(const GroupedGemmParams& params, const Shared& shared) {
    ptx::Deadline deadline = deadline_at(params, Place::kLoader);
    TaskCursor cursor;
    StageCursor stages;
    ptx::prefetch_tensormap(&params.x);
    ptx::prefetch_tensormap(&params.weights);
    for (;;) {
        const TileTask task = read_task(shared, cursor, deadline);
        if (task.kind == kExitTask) break;
        free_task(shared, cursor);
        const TileOperands operands{&params.x,
                                    task.row,
                                    task.parts(),
                                    {&params.weights, &params.weights},
                                    {task.column, task.column + static_cast<int32_t>(kWeightBoxRows)},
                                    task.expert,
                                    params.k_steps};
        if (!load_tile(shared, stages, operands, deadline)) break;
    }
    wait_stages_landed(shared, stages, deadline);
    return deadline.expired;
}

MOK_DEVICE bool run_store_warp(const GroupedGemmParams& params, const Shared& shared) {
    constexpr uint32_t kBoxes = kTileN / kBoxColumns;
    ptx::Deadline deadline = deadline_at(params, Place::kStore);
    const uint32_t lane = ptx::lane_idx();
    TaskCursor cursor;
    StagingCursor staging[kParts];
    for (;;) {
        const TileTask task = take_task(shared, cursor, lane, deadline);
        if (task.kind == kExitTask) break;
        store_staged(shared, staging, task.parts(), deadline, [&](uint32_t part) {
            store_boxes<kBoxes>(&params.y, task.column, task.row + static_cast<int32_t>(part * kPartRows),
                                params.columns, shared.staging(part));
        });
        release_staging(shared, staging, task.parts(), lane, deadline);
        if (deadline.expired) break;
    }
    ptx::bulk_wait<0>();
    return deadline.expired;
}

MOK_DEVICE bool run_consumer(const GroupedGemmParams& params, const Shared& shared, uint32_t consumer_warp) {
    ptx::Deadline deadline = deadline_at(params, Place::kConsumer);
    const uint32_t lane = ptx::lane_idx(), part = consumer_warp / kPartWarps,
                   part_warp = consumer_warp % kPartWarps;
    TaskCursor cursor;
    StageCursor stages;
    StagingCursor staging;
    for (;;) {
        const TileTask task = take_task_as_part(shared, cursor, part, lane, deadline);
        if (task.kind == kExitTask) break;
        if (!task.has_part(part)) {
            skip_tile(shared, stages, params.k_steps, lane, deadline);
            continue;
        }
        float accumulators[kAccumulators];
        multiply_tile(shared, stages, part, params.k_steps, lane, deadline, accumulators);
        uint32_t words[kWords];
        round_part(accumulators, words);
        begin_staging(shared, staging, part, deadline);
        stage_boxes<0, kTileN / kBoxColumns>(shared.staging(part), part_warp, lane, words);
        end_staging(shared, staging, part, lane);
    }
    return deadline.expired;
}

}  // namespace grouped_gemm_detail

__global__ void __launch_bounds__(sm90::kThreads, 1)
    sm90_bf16_grouped_gemm_kernel(const __grid_constant__ GroupedGemmParams params) {
    using namespace grouped_gemm_detail;
    const Shared shared{ptx::dynamic_shared()};
    const uint32_t warp = ptx::warp_idx();
    if (!begin_block(shared, params.limits)) return;
    bool is_expired = false;
    if (warp < kFirstConsumerWarp) {
        ptx::registers_decrease<kServingRegisters>();
        if (warp == kLoaderWarp) {
            if (ptx::elect_one()) is_expired = run_loader(params, shared);
        } else if (warp == kSchedulerWarp) {
            if (ptx::elect_one()) is_expired = run_scheduler(params, shared);
        } else if (warp == kStoreWarp) {
            is_expired = run_store_warp(params, shared);
        }
    } else {
        ptx::registers_increase<kConsumerRegisters>();
        is_expired = run_consumer(params, shared, warp - kFirstConsumerWarp);
    }
    end_block(params.limits, is_expired);
}

}  // namespace mok
