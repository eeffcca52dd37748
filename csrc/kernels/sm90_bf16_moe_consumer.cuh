// The consumer warpgroups of the BF16 forward megakernel: products, biases, activation, staging.
#pragma once

#include "csrc/gemm/activation.cuh"
#include "csrc/gemm/sm90_mainloop.cuh"
#include "csrc/gemm/sm90_staging.cuh"
#include "csrc/kernels/sm90_bf16_moe_params.cuh"

namespace mok::moe_forward_detail {

/// One warp's place among the consumers, and where it is in the rings.
struct Consumer {
    uint32_t part, part_warp, lane;
    TaskCursor tasks;
    StageCursor stages;
    StagingCursor staging;
};

inline constexpr uint32_t kHalfBlocks = kTileN / 2 / 8;  // 8-column blocks of gate, and of up

/// Columns 8 j .. of `words` are gate's, columns 128 + 8 j .. up's; the former become h = rn(act(g, u)).
template <ActivationForm kForm>
MOK_DEVICE void activate_words(float limit, uint32_t (&words)[kWords]) {
#pragma unroll
    for (uint32_t i = 0; i < kWords / 2; ++i) {
        const uint32_t gate = words[i], up = words[kWords / 2 + i];
        words[i] = ptx::pack_bf16(activate<kForm>(ptx::low_bf16(gate), ptx::low_bf16(up), limit),
                                  activate<kForm>(ptx::high_bf16(gate), ptx::high_bf16(up), limit));
    }
}

template <ActivationForm kForm>
MOK_DEVICE void finish_gate_up(const MoeForwardParams& params, const Shared& shared, const TileTask& task,
                               Consumer& self, ptx::Deadline& deadline,
                               float (&accumulators)[kAccumulators]) {
    const MoeExperts& experts = experts_of(params, task);
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
    const uint32_t staging = shared.staging(self.part);
    if (saves(task)) {
        if (task.valid_rows < static_cast<int32_t>(kTileM)) {
            zero_padding(task.valid_rows - static_cast<int32_t>(self.part * kPartRows), self.part_warp,
                         self.lane, words);
        }
        begin_staging(shared, self.staging, self.part, deadline);
        stage_boxes<0, kTileN / kBoxColumns>(staging, self.part_warp, self.lane, words);
        end_staging(shared, self.staging, self.part, self.lane);
    }
    if (!makes_hidden(params)) return;
    activate_words<kForm>(params.limit, words);
    begin_staging(shared, self.staging, self.part, deadline);
    stage_boxes<0, kTileN / 2 / kBoxColumns>(staging, self.part_warp, self.lane, words);
    end_staging(shared, self.staging, self.part, self.lane);
}

MOK_DEVICE void finish_down(const MoeForwardParams& params, const Shared& shared, const TileTask& task,
                            Consumer& self, ptx::Deadline& deadline, float (&accumulators)[kAccumulators]) {
    const MoeExperts& experts = experts_of(params, task);
    if (experts.b_down != nullptr) {
        const int32_t columns = static_cast<int32_t>(params.shape.sizes.hidden) - task.column;
        const bf16* bias = experts.b_down + task.expert * experts.b_down_stride + task.column;
        add_bias<0, kTileN / 8>(bias, columns, self.lane, accumulators);
    }
    uint32_t words[kWords];
    round_part(accumulators, words);
    begin_staging(shared, self.staging, self.part, deadline);
    stage_rows(shared.staging(self.part), self.part_warp, self.lane, words);
    end_staging(shared, self.staging, self.part, self.lane);
}

template <ActivationForm kForm, bool kTimeline>
MOK_DEVICE bool run_consumer(const MoeForwardParams& params, const Shared& shared, uint32_t consumer_warp) {
    ptx::Deadline deadline = deadline_at(params, WaitPlace::kConsumer);
    Consumer self{consumer_warp / kPartWarps, consumer_warp % kPartWarps, ptx::lane_idx(), {}, {}, {}};
    [[maybe_unused]] const bool records = consumer_warp == 0 && self.lane == 0;
    for (;;) {
        const TileTask task = take_task_as_part(shared, self.tasks, self.part, self.lane, deadline);
        if (task.kind == kExitTask) break;
        const int32_t steps = k_steps(params, task);
        if (!task.has_part(self.part)) {
            skip_tile(shared, self.stages, steps, self.lane, deadline);
            continue;
        }
        if constexpr (kTimeline) {
            ptx::mbar_wait(shared.stage_full(self.stages.slot), self.stages.parity, deadline);
            if (records) record_start(params, task, steps);
        }
        float accumulators[kAccumulators];
        multiply_tile(shared, self.stages, self.part, steps, self.lane, deadline, accumulators);
        if (is_gate_up(task)) {
            finish_gate_up<kForm>(params, shared, task, self, deadline, accumulators);
        } else {
            finish_down(params, shared, task, self, deadline, accumulators);
        }
        if constexpr (kTimeline) {
            if (records) record_end(params, task);
        }
    }
    return deadline.expired;
}

}  // namespace mok::moe_forward_detail
