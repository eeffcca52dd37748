// The scheduler warp's loop, the same in both BF16 megakernels; what differs between the passes is a type.
#pragma once

#include "csrc/gemm/sm90_task.cuh"
#include "csrc/kernels/sm90_bf16_moe_call.cuh"

namespace mok::moe_detail {

/// The whole warp: claims the next task when the loader nears the end of one, waits for its operands, hands
/// it to the block. `Pass` names the kernel's Params and Tile (a TileTask) and has three static functions for
/// the whole warp:
///   decode  schedule::decode_task; `run_hint` is the run that the last index lay in
///   wait    returns when lane 0's signal may say that the operands are there: with the counter that was last
///           found short, -1 if none was (lane 0's is recorded)
///   tile    what the block's other warps are told of the task
/// With `kPreviews` the loader sees the first task before its operands are there.
template <typename Pass, bool kTimeline>
MOK_DEVICE bool run_scheduler(const typename Pass::Params& params, const Shared& shared) {
    ptx::Deadline deadline = deadline_at(params, WaitPlace::kScheduler);
    const uint32_t lane = ptx::lane_idx();
    TaskCursor cursor;
    StagingCursor claim;
    const schedule::Table table = *params.call.table;
    int32_t run_hint = 0;
    [[maybe_unused]] bool is_first = true;
    for (;;) {
        ptx::mbar_wait(shared.claim(), claim.parity ^ 1, deadline);  // at once for the first task
        claim.next();
        uint32_t index = 0;
        if (lane == 0) index = ptx::atom_relaxed_gpu_add(params.call.task_claim, 1u);
        index = ptx::shuffle(index, 0);
        const schedule::Task task = Pass::decode(params, table, index, run_hint, lane);
        typename Pass::Tile tile{};
        tile.kind = kExitTask;
        if (task.kind != TaskKind::kExit) {
            tile = Pass::tile(params, table, task, static_cast<int32_t>(index));
        }
        if constexpr (Pass::kPreviews) {
            if (is_first && lane == 0) preview_task(shared, tile);
            is_first = false;
        }
        if (task.kind != TaskKind::kExit) {
            deadline.place = static_cast<uint32_t>(WaitPlace::kTask);
            const int32_t waited_for = Pass::wait(params, table, task, lane, deadline);
            deadline.place = static_cast<uint32_t>(WaitPlace::kScheduler);
            if constexpr (kTimeline) tile.flags |= (waited_for + 1) << kWaitedShift;
        }
        if (ptx::any_lane(deadline.expired)) return true;
        if (lane == 0) publish_task(shared, cursor, tile, deadline);
        cursor = TaskCursor{ptx::shuffle(cursor.slot, 0), ptx::shuffle(cursor.parity, 0)};
        if (tile.kind == kExitTask) return ptx::any_lane(deadline.expired);
    }
}

}  // namespace mok::moe_detail
