// The store warp of the BF16 forward megakernel: staged results to the ring, to the saved context and to the
// rows' home ranks; then the counters.
#pragma once

#include "csrc/gemm/sm90_staging.cuh"
#include "csrc/kernels/sm90_bf16_moe_params.cuh"

namespace mok::moe_forward_detail {

/// gate and up of a part, staged side by side.
MOK_DEVICE void store_gate_up(const MoeForwardParams& params, const TileTask& task, uint32_t part,
                              uint32_t staging) {
    constexpr uint32_t kBoxes = kTileN / 2 / kBoxColumns;
    const MoeRows& rows = rows_of(params, task);
    const int32_t row =
        task.row_block * static_cast<int32_t>(kTileM) + static_cast<int32_t>(part * kPartRows);
    const int32_t columns = inner_of(params, task);
    store_boxes<kBoxes>(&rows.gate, task.column, row, columns, staging);
    store_boxes<kBoxes>(&rows.up, task.column, row, columns, staging + kBoxes * kRowBoxBytes);
}

MOK_DEVICE void store_hidden(const MoeForwardParams& params, const TileTask& task, uint32_t part,
                             uint32_t staging) {
    store_boxes<kTileN / 2 / kBoxColumns>(&rows_of(params, task).hidden, task.column,
                                          task.row + static_cast<int32_t>(part * kPartRows),
                                          inner_of(params, task), staging);
}

/// The whole warp.
MOK_DEVICE bool run_store_warp(const MoeForwardParams& params, const Shared& shared) {
    ptx::Deadline deadline = deadline_at(params, WaitPlace::kStore);
    const uint32_t lane = ptx::lane_idx();
    TaskCursor cursor;
    StagingCursor staging[kParts];
    const bool hidden = makes_hidden(params);
    for (;;) {
        const TileTask task = take_task(shared, cursor, lane, deadline);
        if (task.kind == kExitTask) break;
        const bool gate_up = is_gate_up(task);
        // A gate/up tile is staged once for what is saved, once for h; a down tile once.
        const uint32_t saved_rounds = gate_up && saves(task) ? 1 : 0;
        const uint32_t rounds = saved_rounds + (!gate_up || hidden ? 1 : 0);
        uint32_t* counter =
            counter_address(params, gate_up ? Counter::kGateUp : Counter::kHiddenRead,
                            schedule::counter_block(params.shape, is_shared(task), task.row_block));
        if (!gate_up) stage_homes(params, shared, task, lane);
        for (uint32_t round = 0; round < rounds; ++round) {
            store_staged(shared, staging, task.parts(), deadline, [&](uint32_t part) {
                if (!gate_up) {
                    store_rows(params, shared, task, part);
                } else if (round < saved_rounds) {
                    store_gate_up(params, task, part, shared.staging(part));
                } else {
                    store_hidden(params, task, part, shared.staging(part));
                }
            });
            // What is staged has been multiplied by all of h's columns: TMA has read them.
            if (!gate_up && lane == 0 && !deadline.expired) ptx::red_release_gpu_add(counter, 1u);
            release_staging(shared, staging, task.parts(), lane, deadline);
        }
        if (deadline.expired) break;
        if (gate_up) {
            ptx::bulk_wait<0>();  // the stores are complete, not only read
            ptx::sync_warp();
            if (lane == 0) ptx::red_release_gpu_add(counter, task.parts());
        }
    }
    // Rows on other ranks: complete, and before whatever a later kernel of this stream releases.
    ptx::bulk_wait<0>();
    ptx::fence_acq_rel_sys();
    return deadline.expired;
}

}  // namespace mok::moe_forward_detail
