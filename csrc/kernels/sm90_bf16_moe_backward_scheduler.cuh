// The scheduler warp of the BF16 backward megakernel.
#pragma once

#include "csrc/kernels/sm90_bf16_moe_backward_params.cuh"
#include "csrc/kernels/sm90_bf16_moe_scheduler_loop.cuh"

namespace mok::moe_backward_detail {

/// A tile of one row block.
MOK_DEVICE void set_block_tile(const MoeBackwardParams& params, const schedule::Table& table,
                               const schedule::Task& task, BackwardTask& tile) {
    const schedule::ScheduleShape& shape = params.shape;
    const bool gate_up = task.kind == TaskKind::kGateUp;
    tile.valid_rows = schedule::valid_rows(shape, table, task.shared, task.expert, task.begin);
    tile.row = task.shared ? task.begin * shape.block_m : ring_row(shape, task.begin);
    tile.column = task.n_tile * static_cast<int32_t>(gate_up ? kTileN / 2 : kTileN);
    tile.span = tile.span_tile = -1;
    const int32_t inner = inner_of(params, tile);
    if (task.kind == TaskKind::kDx) {
        tile.steps = 2 * steps_of(inner);
    } else if (task.kind != TaskKind::kRouterGrad) {
        tile.steps = steps_of(hidden_of(params));
    }
    if (task.kind == TaskKind::kDHidden) {
        tile.chunks = chunks_of(inner - tile.column);
        if (!task.shared && shape.saves_gate_up(task.chunk)) tile.flags |= kSavedGateUp;
    }
    if (schedule::finishes_router_gradient(shape, task)) tile.flags |= kRouter;
}

/// A tile of a weight gradient, or columns of a bias's.
MOK_DEVICE void set_gradient_tile(const MoeBackwardParams& params, const schedule::Table& table,
                                  const schedule::Task& task, BackwardTask& tile) {
    constexpr int32_t kStepsOfBlock = kTileM / kTileK;
    const schedule::ScheduleShape& shape = params.shape;
    tile.span = task.shared || has(tile, kZeroes) ? -1 : task.span;
    tile.span_tile = task.cut_ordinal >= 0 ? task.span_tile : -1;
    int32_t rows = 0;  // summed over
    if (!has(tile, kZeroes)) {
        const int32_t last = task.end - 1;
        const int32_t valid = schedule::valid_rows(shape, table, task.shared, task.expert, last);
        rows = (last - task.begin) * shape.block_m + valid;
        tile.steps = (last - task.begin) * kStepsOfBlock + steps_of(valid);
    }
    if (!task.shared && shape.saves_x(task.chunk)) tile.flags |= kSavedX;
    if (task.continues) tile.flags |= kContinues;
    if (task.unfinished) tile.flags |= kUnfinished;
    tile.column = task.n_tile * static_cast<int32_t>(kTileN);
    if (is_bias(tile)) {
        tile.row = rows;
        tile.valid_rows = 1;  // one part does it
        return;
    }
    tile.row = task.m_tile * static_cast<int32_t>(kTileM);
    const int32_t left = gradient_rows(params, tile) - tile.row;
    tile.valid_rows = left < static_cast<int32_t>(kTileM) ? left : static_cast<int32_t>(kTileM);
    tile.chunks = chunks_of(gradient_columns(params, tile) - tile.column);
    const bool adds = params.accumulate && !task.unfinished;
    const bool is_float = task.unfinished || (gradients_of(params, tile).float32 >> matrix_of(tile) & 1) != 0;
    if (adds) tile.flags |= kAddsChunks;
    if (is_float) tile.flags |= kFloatChunks;
    if (adds || is_float) tile.flags |= kLeavesChunks;
}

/// What run_scheduler asks for.
struct BackwardPass {
    using Params = MoeBackwardParams;
    using Tile = BackwardTask;
    static constexpr bool kPreviews = false;

    MOK_DEVICE static schedule::Task decode(const Params& params, const schedule::Table& table, int64_t index,
                                            int32_t& run_hint, uint32_t lane) {
        if (index < table.num_shared_tasks) return schedule::shared_task(params.shape, index);
        index -= table.num_shared_tasks;
        if (index < table.num_routed_tasks) {
            run_hint = find_run<&schedule::Run::task_begin>(table, index, run_hint, lane);
            return schedule::routed_task(params.shape, table, run_hint, index);
        }
        index -= table.num_routed_tasks;
        return index < schedule::num_zero_tasks(params.shape, table)
                   ? schedule::zero_task(params.shape, table, index)
                   : schedule::empty_task(TaskKind::kExit);
    }

    /// 32 counters at a time: in this pass a task waits for counters of its own row blocks, and of its
    /// accumulator.
    MOK_DEVICE static int32_t wait(const Params& params, const schedule::Table& table,
                                   const schedule::Task& task, uint32_t lane, ptx::Deadline& deadline) {
        if (!params.shape.backward()) __builtin_unreachable();  // leaves out the other pass's waits
        schedule::Wait waits[schedule::kMaxWaits];
        const int32_t num_waits = schedule::task_waits(params.shape, task, waits);
        const int32_t first_block = schedule::counter_block(params.shape, task.shared, 0);
        int32_t waited_for = -1;
        for (int32_t i = 0; i < num_waits; ++i) {
            const schedule::Wait& wait = waits[i];
            for (int32_t first = wait.first; first < wait.last; first += ptx::kWarpThreads) {
                const int32_t index = first + static_cast<int32_t>(lane);
                bool is_short = false;
                if (index < wait.last) {
                    const uint32_t* counter = counter_address(params, table, wait.counter, index);
                    int32_t target = wait.target;
                    if (target == schedule::kFinal) {
                        target = schedule::block_final_value(params.shape, table, wait.counter, task.shared,
                                                             task.expert, task.chunk, index - first_block);
                    }
                    is_short = ptx::ld_acquire_gpu(counter) < static_cast<uint32_t>(target);
                    if (is_short) {
                        ptx::wait_reached_acquire_gpu(counter, static_cast<uint32_t>(target), deadline);
                    }
                }
                if (ptx::any_lane(is_short)) waited_for = static_cast<int32_t>(wait.counter);
            }
        }
        ptx::sync_warp();  // what any lane has acquired comes before lane 0's signal
        return waited_for;
    }

    MOK_DEVICE static Tile tile(const Params& params, const schedule::Table& table, schedule::Task task,
                                int32_t id) {
        Tile tile{};
        tile.flags = task.shared ? kShared : 0;
        if (task.kind == TaskKind::kZeroGrad) {
            tile.flags |= kZeroes;
            schedule::set_gradient_tile(params.shape, task.shared ? params.shape.shared : params.shape.routed,
                                        task.span_tile, task);
        }
        tile.kind = static_cast<int32_t>(task.kind);
        tile.expert = task.shared ? 0 : task.expert;
        tile.row_block = task.begin;
        tile.id = id;
        if (task.is_gradient()) {
            set_gradient_tile(params, table, task, tile);
        } else {
            set_block_tile(params, table, task, tile);
        }
        return tile;
    }
};

}  // namespace mok::moe_backward_detail
