// The scheduler and the loader warp of the BF16 forward megakernel.
#pragma once

#include "csrc/gemm/sm90_mainloop.cuh"
#include "csrc/kernels/sm90_bf16_moe_params.cuh"
#include "csrc/kernels/sm90_bf16_moe_scheduler_loop.cuh"

namespace mok::moe_forward_detail {

/// Lane 0 waits for the operands of a task whose kind, and with it the counters, the compiler knows: the code
/// of schedule::task_waits and its targets is a fraction then. Returns the counter that was last found short,
/// -1 if none was.
template <TaskKind kKind>
MOK_DEVICE int32_t wait_for_kind(const MoeForwardParams& params, const schedule::Table& table,
                                 schedule::Task task, ptx::Deadline& deadline) {
    constexpr int32_t kMost = kKind == TaskKind::kGateUp ? 2 : 1;
    if (params.shape.backward()) __builtin_unreachable();
    task.kind = kKind;
    schedule::Wait waits[schedule::kMaxWaits];
    const int32_t num_waits = schedule::task_waits(params.shape, task, waits);
    int32_t waited_for = -1;
#pragma unroll
    for (int32_t i = 0; i < kMost; ++i) {
        if (i >= num_waits) continue;
        // All are of one row block: the task's own, or the one whose slot of h it takes, where the value is
        // that of every row block.
        const Counter counter = waits[i].counter;
        const uint32_t target = static_cast<uint32_t>(schedule::block_final_value(
            params.shape, table, counter, task.shared, task.expert, task.chunk, task.begin));
        const uint32_t* address = counter_address(params, counter, waits[i].first);
        if (ptx::ld_acquire_gpu(address) >= target) continue;
        waited_for = static_cast<int32_t>(counter);
        ptx::wait_reached_acquire_gpu(address, target, deadline);
    }
    return waited_for;
}

/// What run_scheduler asks for.
struct ForwardPass {
    using Params = MoeForwardParams;
    using Tile = TileTask;
    static constexpr bool kPreviews = true;

    /// Forward and recompute have no tasks over spans.
    MOK_DEVICE static schedule::Task decode(const Params& params, const schedule::Table& table, int64_t index,
                                            int32_t& run_hint, uint32_t lane) {
        if (index < table.num_shared_tasks) return schedule::shared_task<false>(params.shape, index);
        index -= table.num_shared_tasks;
        if (index >= table.num_routed_tasks) return schedule::empty_task(TaskKind::kExit);
        run_hint = find_run<&schedule::Run::task_begin>(table, index, run_hint, lane);
        return schedule::routed_task<false>(params.shape, table, run_hint, index);
    }

    MOK_DEVICE static int32_t wait(const Params& params, const schedule::Table& table,
                                   const schedule::Task& task, uint32_t lane, ptx::Deadline& deadline) {
        if (lane != 0) return -1;
        return task.kind == TaskKind::kGateUp
                   ? wait_for_kind<TaskKind::kGateUp>(params, table, task, deadline)
                   : wait_for_kind<TaskKind::kDown>(params, table, task, deadline);
    }

    MOK_DEVICE static Tile tile(const Params& params, const schedule::Table& table,
                                const schedule::Task& task, int32_t id) {
        const schedule::ScheduleShape& shape = params.shape;
        const bool gate_up = task.kind == TaskKind::kGateUp;
        Tile tile{};
        tile.kind = static_cast<int32_t>(task.kind);
        tile.flags = task.shared ? kShared : 0;
        // The shared expert's rows belong to the first chunk, which is the saved one.
        if (gate_up && shape.saves_gate_up(task.shared ? 0 : task.chunk)) tile.flags |= kSavesGateUp;
        if (gate_up && !task.shared && shape.saves_x(task.chunk)) tile.flags |= kReadsSavedX;
        tile.valid_rows = schedule::valid_rows(shape, table, task.shared, task.expert, task.begin);
        tile.expert = task.shared ? 0 : task.expert;
        tile.row_block = task.begin;
        tile.row = task.shared ? task.begin * shape.block_m : ring_row(shape, task.begin);
        tile.column = task.n_tile * static_cast<int32_t>(gate_up ? kTileN / 2 : kTileN);
        tile.id = id;
        return tile;
    }
};

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
    // The weights of the first tile, while its rows are still on their way.
    const TileTask first = read_preview(shared, deadline);
    int32_t early_steps = 0;
    if (first.kind != kExitTask) early_steps = begin_first_tile(shared, operands_of(params, first));
    for (;;) {
        const TileTask task = read_task(shared, cursor, deadline);
        if (task.kind == kExitTask) break;
        free_task(shared, cursor);
        // Rows that other blocks stored, as the scheduler has acquired; TMA reads them by another proxy.
        ptx::fence_proxy_async_global();
        const bool in_time = load_tile(shared, stages, operands_of(params, task), deadline, early_steps);
        early_steps = 0;
        if (!in_time) break;
    }
    abandon_first_tile(shared, stages, early_steps);
    wait_stages_landed(shared, stages, deadline);
    return deadline.expired;
}

}  // namespace mok::moe_forward_detail
