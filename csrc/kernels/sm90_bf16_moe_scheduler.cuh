// The scheduler and the loader warp of the BF16 forward megakernel.
#pragma once

#include "csrc/gemm/sm90_mainloop.cuh"
#include "csrc/kernels/sm90_bf16_moe_params.cuh"

namespace mok::moe_forward_detail {

MOK_DEVICE TileTask tile_task(const MoeForwardParams& params, const schedule::Task& task, int32_t id) {
    const schedule::ScheduleShape& shape = params.shape;
    const bool gate_up = task.kind == TaskKind::kGateUp;
    TileTask tile{};
    tile.kind = static_cast<int32_t>(task.kind);
    tile.flags = task.shared ? kShared : 0;
    // The shared expert's rows belong to the first chunk, which is the saved one.
    if (gate_up && shape.saves_gate_up(task.shared ? 0 : task.chunk)) tile.flags |= kSavesGateUp;
    if (gate_up && !task.shared && shape.saves_x(task.chunk)) tile.flags |= kReadsSavedX;
    tile.valid_rows = schedule::valid_rows(shape, *params.call.table, task.shared, task.expert, task.begin);
    tile.expert = task.shared ? 0 : task.expert;
    tile.row_block = task.begin;
    tile.row = task.shared ? task.begin * shape.block_m : ring_row(shape, task.begin);
    tile.column = task.n_tile * static_cast<int32_t>(gate_up ? kTileN / 2 : kTileN);
    tile.id = id;
    return tile;
}

/// The whole warp: claims the next task when the loader nears the end of one, waits for its operands, hands
/// it to the block.
template <bool kTimeline>
MOK_DEVICE bool run_scheduler(const MoeForwardParams& params, const Shared& shared) {
    ptx::Deadline deadline = deadline_at(params, WaitPlace::kScheduler);
    const uint32_t lane = ptx::lane_idx();
    TaskCursor cursor;
    StagingCursor claim;
    int32_t run_hint = 0;
    for (bool is_first = true;; is_first = false) {
        if (!is_first) {
            ptx::mbar_wait(shared.claim(), claim.parity, deadline);
            claim.next();
        }
        uint32_t index = 0;
        if (lane == 0) index = ptx::atom_relaxed_gpu_add(params.call.task_claim, 1u);
        index = ptx::shuffle(index, 0);
        const schedule::Task task = schedule::decode_task(params.shape, *params.call.table, index, run_hint);
        TileTask tile{};
        tile.kind = kExitTask;
        if (task.kind != TaskKind::kExit) {
            deadline.place = static_cast<uint32_t>(WaitPlace::kTask);
            const int32_t waited_for = wait_for_operands<false>(params, task, lane, deadline);
            deadline.place = static_cast<uint32_t>(WaitPlace::kScheduler);
            tile = tile_task(params, task, static_cast<int32_t>(index));
            if constexpr (kTimeline) tile.flags |= (waited_for + 1) << kWaitedShift;
        }
        if (ptx::any_lane(deadline.expired)) return true;
        ptx::sync_warp();  // what any lane has acquired comes before lane 0's signal
        if (lane == 0) publish_task(shared, cursor, tile, deadline);
        cursor = TaskCursor{ptx::shuffle(cursor.slot, 0), ptx::shuffle(cursor.parity, 0)};
        if (tile.kind == kExitTask) return ptx::any_lane(deadline.expired);
    }
}

/// Where a task's operands lie.
MOK_DEVICE TileOperands operands_of(const MoeForwardParams& params, const TileTask& task) {
    const MoeExperts& experts = experts_of(params, task);
    const MoeRows& rows = rows_of(params, task);
    TileOperands operands{};
    operands.a_row = task.row;
    operands.a_parts = task.parts();
    operands.matrix = task.expert;
    operands.k_steps = k_steps(params, task);
    if (is_gate_up(task)) {
        operands.a = &rows.x;
        if ((task.flags & kReadsSavedX) != 0) {
            operands.a = &params.saved_x;
            operands.a_row = task.row_block * static_cast<int32_t>(kTileM);
        }
        operands.b[0] = &experts.gate;
        operands.b[1] = &experts.up;
        operands.b_row[0] = operands.b_row[1] = task.column;
    } else {
        operands.a = &rows.hidden;
        operands.b[0] = operands.b[1] = &experts.down;
        operands.b_row[0] = task.column;
        operands.b_row[1] = task.column + static_cast<int32_t>(kWeightBoxRows);
    }
    return operands;
}

/// One thread.
MOK_DEVICE bool run_loader(const MoeForwardParams& params, const Shared& shared) {
    ptx::Deadline deadline = deadline_at(params, WaitPlace::kLoader);
    TaskCursor cursor;
    StageCursor stages;
    for (;;) {
        const TileTask task = read_task(shared, cursor, deadline);
        if (task.kind == kExitTask) break;
        free_task(shared, cursor);
        // Rows that other blocks stored, as the scheduler has acquired; TMA reads them by another proxy.
        ptx::fence_proxy_async_global();
        if (!load_tile(shared, stages, operands_of(params, task), deadline)) break;
    }
    return deadline.expired;
}

}  // namespace mok::moe_forward_detail
