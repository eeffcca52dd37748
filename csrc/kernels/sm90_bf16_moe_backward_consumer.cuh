// The consumer warpgroups of the BF16 backward megakernel: products and their epilogues.
#pragma once

#include "csrc/gemm/sm90_dhidden.cuh"
#include "csrc/kernels/sm90_bf16_moe_backward_router.cuh"

namespace mok::moe_backward_detail {

/// Calls body(chunk) for the task's chunks, each with its accumulators in the first places; afterwards they
/// are lost.
template <typename Body>
MOK_DEVICE void for_chunks(const BackwardTask& task, float (&accumulators)[kAccumulators], const Body& body) {
#pragma unroll 1
    for (int32_t chunk = 0;;) {
        body(chunk);
        if (++chunk >= task.chunks) break;
        shift_chunks(accumulators);
    }
}

MOK_DEVICE void wait_stage(const Shared& shared, const Consumer& self, ptx::Deadline& deadline) {
    ptx::mbar_wait(shared.stage_full(self.stages.slot), self.stages.parity, deadline);
}

MOK_DEVICE void finish_gate_up(const MoeBackwardParams& params, const Shared& shared,
                               const BackwardTask& task, Consumer& self, ptx::Deadline& deadline,
                               float (&accumulators)[kAccumulators]) {
    constexpr uint32_t kHalfBlocks = kTileN / 2 / 8;
    const MoeBackwardExperts& experts = experts_of(params, task);
    const int32_t columns = inner_of(params, task) - task.column;
    if (experts.b_gate != nullptr) {
        const bf16* bias = experts.b_gate + task.expert * experts.b_gate_stride + task.column;
        add_bias<0, kHalfBlocks>(bias, columns, self.lane, accumulators);
    }
    if (experts.b_up != nullptr) {
        const bf16* bias = experts.b_up + task.expert * experts.b_up_stride + task.column;
        add_bias<kHalfBlocks, kHalfBlocks>(bias, columns, self.lane, accumulators);
    }
    uint32_t words[kWords];
    round_part(accumulators, words);
    begin_staging(shared, self.staging, self.part, deadline);
    stage_boxes<0, kTileN / kBoxColumns>(shared.staging(self.part), self.part_warp, self.lane, words);
    end_staging(shared, self.staging, self.part, self.lane);
}

/// The thread's rows of a dhidden tile.
MOK_DEVICE RowPair row_pair(const Shared& shared, const BackwardTask& task, const Consumer& self) {
    RowPair rows{};
#pragma unroll
    for (int32_t h = 0; h < 2; ++h) {
        const uint32_t row = self.part_warp * 16 + self.lane / 4 + 8 * static_cast<uint32_t>(h);
        rows.is_valid[h] = self.row() + 8 * h < task.valid_rows;
        if (rows.is_valid[h]) rows.weight[h] = ptx::load_shared<float>(staged_weight(shared, self.part, row));
    }
    return rows;
}

template <ActivationForm kForm, bool kRagged>
MOK_DEVICE void finish_dhidden_chunks(const Shared& shared, const BackwardTask& task, const RowPair& rows,
                                      float limit, Consumer& self, ptx::Deadline& deadline,
                                      float (&accumulators)[kAccumulators]) {
    for_chunks(task, accumulators, [&](int32_t chunk) {
        wait_stage(shared, self, deadline);
        float sums[2];
        finish_dhidden_chunk<kForm, kRagged>(shared, self.stages.slot, self.part, self.part_warp, self.lane,
                                             rows, limit, accumulators, sums);
        if (chunk == 0) begin_staging(shared, self.staging, self.part, deadline);
        if (self.lane % 4 == 0) {
            const uint32_t row = self.part_warp * 16 + self.lane / 4;
            const uint32_t first = staged_sum(shared, self.part, row, static_cast<uint32_t>(chunk));
            ptx::store_shared(first, sums[0]);
            ptx::store_shared(first + 8 * kChunks * 4, sums[1]);
        }
        hand_over_chunk(shared, self.stages, self.staging, self.part, self.lane, deadline);
    });
}

template <ActivationForm kForm>
MOK_DEVICE void finish_dhidden(const MoeBackwardParams& params, const Shared& shared,
                               const BackwardTask& task, Consumer& self, ptx::Deadline& deadline,
                               float (&accumulators)[kAccumulators]) {
    ptx::mbar_wait(weights_staged(shared, self.part), self.weights.parity, deadline);
    self.weights.next();
    const RowPair rows = row_pair(shared, task, self);
    if (task.valid_rows < static_cast<int32_t>(kTileM)) {
        finish_dhidden_chunks<kForm, true>(shared, task, rows, params.limit, self, deadline, accumulators);
    } else {
        finish_dhidden_chunks<kForm, false>(shared, task, rows, params.limit, self, deadline, accumulators);
    }
}

MOK_DEVICE void finish_dx(const Shared& shared, Consumer& self, ptx::Deadline& deadline,
                          const float (&accumulators)[kAccumulators]) {
    uint32_t words[kWords];
    round_part(accumulators, words);
    begin_staging(shared, self.staging, self.part, deadline);
    stage_rows(shared.staging(self.part), self.part_warp, self.lane, words);
    end_staging(shared, self.staging, self.part, self.lane);
}

MOK_DEVICE void finish_wgrad(const Shared& shared, const BackwardTask& task, Consumer& self,
                             ptx::Deadline& deadline, float (&accumulators)[kAccumulators]) {
    if (!has(task, kLeavesChunks)) {
        uint32_t words[kWords];
        round_part(accumulators, words);
        begin_staging(shared, self.staging, self.part, deadline);
        stage_boxes<0, kTileN / kBoxColumns>(shared.staging(self.part), self.part_warp, self.lane, words);
        end_staging(shared, self.staging, self.part, self.lane);
        return;
    }
    const bool is_float = has(task, kFloatChunks), adds = has(task, kAddsChunks);
    for_chunks(task, accumulators, [&](int32_t) {
        wait_stage(shared, self, deadline);
        const uint32_t boxes = float_box(shared, self.stages.slot, self.part);
        if (!is_float) {
            add_chunk(boxes, self.part_warp, self.lane, accumulators);
        } else if (adds) {
            write_chunk<true>(boxes, self.part_warp, self.lane, accumulators);
        } else {
            write_chunk<false>(boxes, self.part_warp, self.lane, accumulators);
        }
        hand_over_chunk(shared, self.stages, self.staging, self.part, self.lane, deadline);
    });
}

/// A part of a weight gradient: its product, from the stored sums on where its segment has been cut.
MOK_DEVICE void make_wgrad(const Shared& shared, const BackwardTask& task, Consumer& self,
                           ptx::Deadline& deadline) {
    constexpr auto kMN = ptx::Major::kMN;
    float accumulators[kAccumulators] = {};  // a gradient without rows is zeros
    const bool continues = has(task, kContinues);
    if (continues) {
        // Once round, so that each chunk is in its place, and the missing ones of a narrow tile are zeros.
#pragma unroll 1
        for (int32_t chunk = 0; chunk < static_cast<int32_t>(kChunks); ++chunk) {
            if (chunk < task.chunks) {
                wait_stage(shared, self, deadline);
                read_chunk(float_box(shared, self.stages.slot, self.part), self.part_warp, self.lane,
                           accumulators);
                release_stage(shared, self.stages, self.lane);
            }
            rotate_chunks(accumulators);
        }
    }
    if (task.steps > 0) {
        multiply_tile<kMN, kMN>(shared, self.stages, self.part, task.steps, self.lane, deadline, accumulators,
                                continues);
    }
    finish_wgrad(shared, task, self, deadline, accumulators);
}

/// A part of a tile of one row block.
template <ActivationForm kForm>
MOK_DEVICE void make_block_tile(const MoeBackwardParams& params, const Shared& shared,
                                const BackwardTask& task, Consumer& self, ptx::Deadline& deadline) {
    constexpr auto kK = ptx::Major::kK, kMN = ptx::Major::kMN;
    // Zeros, or ptxas takes the accumulators of the last task to be read here, and keeps them all the time.
    float accumulators[kAccumulators] = {};
    if (is_kind(task, TaskKind::kGateUp)) {
        multiply_tile<kK, kK>(shared, self.stages, self.part, task.steps, self.lane, deadline, accumulators);
        finish_gate_up(params, shared, task, self, deadline, accumulators);
        return;
    }
    multiply_tile<kK, kMN>(shared, self.stages, self.part, task.steps, self.lane, deadline, accumulators);
    if (is_kind(task, TaskKind::kDHidden)) {
        finish_dhidden<kForm>(params, shared, task, self, deadline, accumulators);
    } else {
        finish_dx(shared, self, deadline, accumulators);
    }
}

/// A part of a task without a product: a bias gradient, or router gradients alone.
MOK_DEVICE void make_sums(const MoeBackwardParams& params, const Shared& shared, const BackwardTask& task,
                          Consumer& self, ptx::Deadline& deadline) {
    if (is_bias(task)) {
        finish_bias(params, shared, task, self, deadline);
    }
    begin_staging(shared, self.staging, self.part, deadline);
    end_staging(shared, self.staging, self.part, self.lane);
}

template <ActivationForm kForm>
MOK_DEVICE void make_part(const MoeBackwardParams& params, const Shared& shared, const BackwardTask& task,
                          Consumer& self, ptx::Deadline& deadline) {
    if (has(task, kRouter)) finish_router(params, task, self);
    if (is_wgrad(task)) {
        make_wgrad(shared, task, self, deadline);
    } else if (is_bias(task) || is_kind(task, TaskKind::kRouterGrad)) {
        make_sums(params, shared, task, self, deadline);
    } else {
        make_block_tile<kForm>(params, shared, task, self, deadline);
    }
}

template <ActivationForm kForm, bool kTimeline>
MOK_DEVICE bool run_consumer(const MoeBackwardParams& params, const Shared& shared, uint32_t consumer_warp) {
    ptx::Deadline deadline = deadline_at(params, WaitPlace::kConsumer);
    Consumer self{consumer_warp / kPartWarps, consumer_warp % kPartWarps, ptx::lane_idx(), {}, {}, {}, {}};
    [[maybe_unused]] const bool records = consumer_warp == 0 && self.lane == 0;
    for (;;) {
        const BackwardTask task =
            take_task_as_part<BackwardTask>(shared, self.tasks, self.part, self.lane, deadline);
        if (task.kind == kExitTask) break;
        if (!task.has_part(self.part)) {
            skip_tile(shared, self.stages, stages_of(task), self.lane, deadline);
            continue;
        }
        if constexpr (kTimeline) {
            if (stages_of(task) > 0) wait_stage(shared, self, deadline);
            if (records) record_start(params, task, task.steps);
        }
        make_part<kForm>(params, shared, task, self, deadline);
        if constexpr (kTimeline) {
            if (records) record_end(params, task);
        }
    }
    return deadline.expired;
}

}  // namespace mok::moe_backward_detail
