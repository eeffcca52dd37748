// The store warp of the BF16 backward megakernel: staged tiles and chunks to the ring, to gradients and to
// the rows' home ranks; then the counters.
#pragma once

#include "csrc/gemm/sm90_dhidden.cuh"
#include "csrc/kernels/sm90_bf16_moe_backward_params.cuh"

namespace mok::moe_backward_detail {

/// A gradient's matrix.
struct GradientPlace {
    const ptx::TensorMap* map;
    int32_t expert, columns;
};

struct StoreWarp {
    const MoeBackwardParams& params;
    const Shared& shared;
    uint32_t lane;
    ptx::Deadline deadline;
    StagingCursor staging[kParts];
    StageCursor stages;  // where the task's stages begin

    MOK_DEVICE StoreWarp(const MoeBackwardParams& params_in, const Shared& shared_in)
        : params(params_in),
          shared(shared_in),
          lane(ptx::lane_idx()),
          deadline(deadline_at(params_in, WaitPlace::kStore)) {}

    /// Calls body(part), which issues stores, for each part of the task once it is staged, then
    /// signal_inputs_read(); then gives the buffers back.
    template <typename Body, typename Signal>
    MOK_DEVICE void for_staged(const BackwardTask& task, const Body& body, const Signal& signal_inputs_read) {
        store_staged(shared, staging, task.parts(), deadline, body);
        if (!deadline.expired) signal_inputs_read();
        release_staging(shared, staging, task.parts(), lane, deadline);
    }

    /// Calls body(chunk, part, stage) for each part of each chunk that the consumers have left, then gives
    /// the chunk's stage back, behind the next chunk's stores: those would otherwise wait for its own.
    template <typename Body>
    MOK_DEVICE void for_chunks(const BackwardTask& task, const Body& body) {
        static_assert(kStages >= 2);  // the next chunk does not need this one's stage
        uint32_t stage = (stages.slot + static_cast<uint32_t>(stages_of(task) - task.chunks)) % kStages;
        for (int32_t chunk = 0; chunk < task.chunks; ++chunk) {
#pragma unroll
            for (uint32_t part = 0; part < kParts; ++part) {
                if (deadline.expired || !task.has_part(part)) continue;
                deadline.expired |= !take_chunk(shared, staging[part], part, lane, deadline,
                                                [&] { body(chunk, part, stage); });
            }
            ptx::bulk_commit();  // also of half a chunk: the kernel's end waits for it
            if (deadline.expired) return;
            if (chunk > 0) {
                ptx::bulk_wait_read<1>();
                release_chunk(shared, (stage + kStages - 1) % kStages, task.parts(), lane);
            }
            if (chunk + 1 == task.chunks) {
                ptx::bulk_wait_read<0>();
                release_chunk(shared, stage, task.parts(), lane);
            }
            stage = stage + 1 == kStages ? 0 : stage + 1;
        }
    }

    MOK_DEVICE void signal(Counter counter, int32_t index, uint32_t value = 1) {
        ptx::sync_warp();
        if (lane == 0) ptx::red_release_gpu_add(counter_address(params, counter, index), value);
    }
    MOK_DEVICE void signal_block(const BackwardTask& task, Counter counter, uint32_t value = 1) {
        signal(counter, schedule::counter_block(params.shape, is_shared(task), task.row_block), value);
    }

    /// gate and up, staged side by side.
    MOK_DEVICE void store_gate_up(const BackwardTask& task) {
        constexpr uint32_t kBoxes = kTileN / 2 / kBoxColumns;
        const MoeBackwardRows& rows = rows_of(params, task);
        const int32_t columns = inner_of(params, task);
        for_staged(
            task,
            [&](uint32_t part) {
                const int32_t row = task.row + static_cast<int32_t>(part * kPartRows);
                const uint32_t staging = shared.staging(part);
                store_boxes<kBoxes>(&rows.gate, task.column, row, columns, staging);
                store_boxes<kBoxes>(&rows.up, task.column, row, columns, staging + kBoxes * kRowBoxBytes);
            },
            [] {});
        ptx::bulk_wait<0>();
        signal_block(task, Counter::kGateUp, task.parts());
    }

    /// The sums of p a that a part's rows have left, each lane those of two rows.
    MOK_DEVICE void store_partials(const BackwardTask& task, uint32_t part) {
        const int32_t num_partials = steps_of(inner_of(params, task));
        const int32_t first = task.column / static_cast<int32_t>(kChunkColumns);
#pragma unroll
        for (uint32_t i = 0; i < kLaneRows; ++i) {
            const uint32_t row = i * ptx::kWarpThreads + lane;
            const uint32_t tile_row = part * kPartRows + row;
            if (static_cast<int32_t>(tile_row) >= task.valid_rows) continue;
            float* at = rows_of(params, task).weight_partials +
                        static_cast<int64_t>(task.row + static_cast<int32_t>(tile_row)) * num_partials +
                        first;
            for (int32_t chunk = 0; chunk < task.chunks; ++chunk) {
                const uint32_t sum = staged_sum(shared, part, row, static_cast<uint32_t>(chunk));
                ptx::store_global(at + chunk, ptx::load_shared<float>(sum));
            }
        }
    }

    /// Where w of a task's valid row lies; null: 1.
    MOK_DEVICE const float* weight_home(const BackwardTask& task, uint32_t row) {
        const int64_t at = static_cast<int64_t>(task.row_block) * kTileM + row;
        if (is_shared(task)) return params.shared_weight == nullptr ? nullptr : params.shared_weight + at;
        const Route route = route_of(params, at);
        return in_window(params, params.weights, route.peer) + route.slot;
    }

    /// w of a dhidden tile's rows, for the consumers: they need it behind the product, so that nobody waits
    /// for the loads, of which the second one depends on the first and may cross a link.
    MOK_DEVICE void stage_weights(const BackwardTask& task) {
        const bool keeps = params.row_weights != nullptr && !is_shared(task) && task.column == 0;
#pragma unroll 1  // or the warp's registers do not suffice
        for (uint32_t row = lane; static_cast<int32_t>(row) < task.valid_rows; row += ptx::kWarpThreads) {
            const float* home = weight_home(task, row);
            const float weight = home == nullptr ? 1.0f : ptx::load_global(home);
            ptx::store_shared(staged_weight(shared, row / kPartRows, row % kPartRows), weight);
            if (keeps) ptx::store_global(params.row_weights + task.row + static_cast<int32_t>(row), weight);
        }
        ptx::sync_warp();
        if (lane == 0) {
            ptx::mbar_arrive(weights_staged(shared, 0));
            if (task.has_part(1)) ptx::mbar_arrive(weights_staged(shared, 1));
        }
    }

    /// dg, du and h', a chunk at a time.
    MOK_DEVICE void store_dhidden(const BackwardTask& task) {
        const MoeBackwardRows& rows = rows_of(params, task);
        for_chunks(task, [&](int32_t chunk, uint32_t part, uint32_t stage) {
            const int32_t column = task.column + chunk * static_cast<int32_t>(kChunkColumns);
            const int32_t row = task.row + static_cast<int32_t>(part * kPartRows);
            if (ptx::elect_one()) {
                ptx::tma_store_2d(&rows.dgate, column, row, stage_box(shared, stage, kGateBox + part));
                ptx::tma_store_2d(&rows.dup, column, row, stage_box(shared, stage, kUpBox + part));
                ptx::tma_store_2d(&rows.hidden, column, row, stage_box(shared, stage, kHiddenBox + part));
            }
            if (chunk + 1 == task.chunks) store_partials(task, part);
        });
        ptx::bulk_wait<0>();
        signal_block(task, Counter::kDHidden, task.parts());
    }

    MOK_DEVICE void store_dx(const BackwardTask& task) {
        stage_homes(params, shared, task, lane);
        for_staged(
            task, [&](uint32_t part) { store_rows(params, shared, task, part); },
            [&] { signal_block(task, Counter::kDxRead); });
    }

    MOK_DEVICE void signal_read(const BackwardTask& task) {
        if (task.span >= 0) signal(Counter::kSpanRead, task.span);
    }
    MOK_DEVICE void signal_stored(const BackwardTask& task) {
        if (task.span_tile < 0) return;
        ptx::bulk_wait<0>();
        signal(Counter::kAccumulator, task.span_tile, task.parts());
    }

    /// Boxes of kColumns columns of a gradient, side by side, as far as the matrix is wide.
    template <uint32_t kBoxes, int32_t kColumns>
    MOK_DEVICE static void store_gradient(const GradientPlace& place, int32_t column, int32_t row,
                                          uint32_t source) {
        if (ptx::elect_one()) {
#pragma unroll
            for (uint32_t box = 0; box < kBoxes; ++box) {
                const int32_t at = column + static_cast<int32_t>(box) * kColumns;
                if (at < place.columns) {
                    ptx::tma_store_3d(place.map, at, row, place.expert, source + box * kRowBoxBytes);
                }
            }
        }
    }

    MOK_DEVICE void store_wgrad(const BackwardTask& task) {
        constexpr auto kColumns = static_cast<int32_t>(kBoxColumns);
        const int32_t matrix = matrix_of(task);
        const bool is_unfinished = has(task, kUnfinished), is_float = has(task, kFloatChunks);
        const GradientPlace place{
            is_unfinished ? &params.accumulators.weight[matrix] : &gradients_of(params, task).weight[matrix],
            is_unfinished ? 0 : task.expert, gradient_columns(params, task)};
        if (has(task, kLeavesChunks)) {
            for_chunks(task, [&](int32_t chunk, uint32_t part, uint32_t stage) {
                if (chunk == 0 && part == 0) signal_read(task);
                const int32_t column = task.column + chunk * static_cast<int32_t>(kChunkColumns);
                const int32_t row = task.row + static_cast<int32_t>(part * kPartRows);
                const uint32_t boxes = float_box(shared, stage, part);
                if (is_float) {
                    store_gradient<2, kColumns / 2>(place, column, row, boxes);
                } else {
                    store_gradient<1, kColumns>(place, column, row, boxes);
                }
            });
        } else {
            for_staged(
                task,
                [&](uint32_t part) {
                    store_gradient<kTileN / kBoxColumns, kColumns>(
                        place, task.column, task.row + static_cast<int32_t>(part * kPartRows),
                        shared.staging(part));
                },
                [&] { signal_read(task); });
        }
        signal_stored(task);
    }

    /// The consumers have stored the results themselves.
    MOK_DEVICE void finish_sums(const BackwardTask& task) {
        for_staged(
            task, [](uint32_t) {},
            [&] {
                if (is_bias(task)) {
                    signal_read(task);
                } else {
                    signal_block(task, Counter::kDxRead);
                }
            });
        if (is_bias(task)) signal_stored(task);
    }

    MOK_DEVICE void store(const BackwardTask& task) {
        switch (static_cast<TaskKind>(task.kind)) {
            case TaskKind::kGateUp:
                store_gate_up(task);
                break;
            case TaskKind::kDHidden:
                store_dhidden(task);
                break;
            case TaskKind::kDx:
                store_dx(task);
                break;
            default:
                if (is_wgrad(task)) {
                    store_wgrad(task);
                } else {
                    finish_sums(task);
                }
        }
        stages.slot = (stages.slot + static_cast<uint32_t>(stages_of(task))) % kStages;
    }
};

/// The whole warp.
MOK_DEVICE bool run_store_warp(const MoeBackwardParams& params, const Shared& shared) {
    StoreWarp warp(params, shared);
    TaskCursor cursor;
    for (;;) {
        const BackwardTask task = take_task<BackwardTask>(shared, cursor, warp.lane, warp.deadline);
        if (task.kind == kExitTask) break;
        if (is_kind(task, TaskKind::kDHidden)) warp.stage_weights(task);
        warp.store(task);
        if (warp.deadline.expired) break;
    }
    // Rows on other ranks: complete, and before whatever a later kernel of this stream releases.
    ptx::bulk_wait<0>();
    ptx::fence_acq_rel_sys();
    return warp.deadline.expired;
}

}  // namespace mok::moe_backward_detail
