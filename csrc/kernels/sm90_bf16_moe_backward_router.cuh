// Router-weight gradients and bias gradients of the BF16 backward megakernel, by ordinary instructions of the
// consumer warps.
#pragma once

#include "csrc/gemm/sm90_staging.cuh"
#include "csrc/kernels/sm90_bf16_moe_backward_params.cuh"

namespace mok::moe_backward_detail {

/// One warp's place among the consumers, and where it is in the rings.
struct Consumer {
    uint32_t part, part_warp, lane;
    TaskCursor tasks;
    StageCursor stages;
    StagingCursor staging;
    StagingCursor weights;

    /// The warp's first row of a tile's 128, and the lane's first row of an accumulator.
    MOK_DEVICE int32_t first_row() const { return static_cast<int32_t>(part * kPartRows + part_warp * 16); }
    MOK_DEVICE int32_t row() const { return first_row() + static_cast<int32_t>(lane / 4); }
};

inline constexpr uint32_t kWarpRows = 16;

/// Where the gradient of a row's w goes.
MOK_DEVICE float* weight_grad_home(const MoeBackwardParams& params, const BackwardTask& task, int32_t row) {
    const int64_t at = static_cast<int64_t>(task.row_block) * kTileM + row;
    if (is_shared(task)) return params.shared_weight_grads + at;
    const Route route = route_of(params, at);
    return in_window(params, params.home_weight_grads, route.peer) + route.slot;
}

/// Sums of a row over all of I: the partial sums in order. One lane a row.
MOK_DEVICE float sum_partials(const float* partials, int32_t num_partials) {
    constexpr int32_t kBatch = 8;  // loads in flight
    float sum = 0.0f;
    int32_t first = 0;
    for (; first + kBatch <= num_partials; first += kBatch) {
        float values[kBatch];
#pragma unroll
        for (int32_t i = 0; i < kBatch; ++i) values[i] = ptx::load_global(partials + first + i);
#pragma unroll
        for (int32_t i = 0; i < kBatch; ++i) sum = sum + values[i];
    }
    for (; first < num_partials; ++first) sum = sum + ptx::load_global(partials + first);
    return sum;
}

/// BF16 element `index` of a row whose address is a multiple of 4.
MOK_DEVICE float load_bf16(const bf16* row, int32_t index) {
    const uint32_t pair = ptx::load_global(reinterpret_cast<const uint32_t*>(row + index / 2 * 2));
    return index % 2 == 0 ? ptx::low_bf16(pair) : ptx::high_bf16(pair);
}

inline constexpr int32_t kDotRows = 8;  // at a time: their loads are in flight together

/// rows[r] . b over `columns` (a multiple of 8), by the whole warp, in the executor's order: lane l has
/// column 32 i + l; what is left of the last 32 goes to the first chain of 8.
MOK_DEVICE void dots(const bf16* const (&rows)[kDotRows], const bf16* b, int32_t columns, uint32_t lane,
                     float (&sums)[kDotRows]) {
    constexpr int32_t kWarp = ptx::kWarpThreads, kChain = 8;
    const int32_t whole = columns / kWarp * kWarp, own = static_cast<int32_t>(lane);
#pragma unroll
    for (int32_t r = 0; r < kDotRows; ++r) sums[r] = 0.0f;
    const auto add = [&](int32_t column) {
        const float y = load_bf16(b, column);
#pragma unroll
        for (int32_t r = 0; r < kDotRows; ++r) {
            sums[r] = ptx::fused_multiply_add(load_bf16(rows[r], column), y, sums[r]);
        }
    };
    int32_t first = 0;
#pragma unroll 4  // whose loads are in flight together
    for (; first < whole; first += kWarp) add(first + own);
    for (; first < columns; first += kChain) {
        if (own < kChain) add(first + own);
    }
#pragma unroll
    for (int32_t r = 0; r < kDotRows; ++r) {
        const float second = ptx::shuffle(sums[r], (lane + 8) % 32),
                    third = ptx::shuffle(sums[r], (lane + 16) % 32),
                    fourth = ptx::shuffle(sums[r], (lane + 24) % 32);
        float total = ((sums[r] + second) + third) + fourth;  // right in lanes 0 to 7
#pragma unroll
        for (uint32_t mask = 4; mask > 0; mask /= 2) total = total + ptx::shuffle_xor(total, mask);
        sums[r] = ptx::shuffle(total, 0);
    }
}

/// One warp finishes the router gradients of its 16 rows of a row block: lane i < 16 has row i.
MOK_DEVICE void finish_router(const MoeBackwardParams& params, const BackwardTask& task,
                              const Consumer& self) {
    const MoeBackwardRows& rows = rows_of(params, task);
    const MoeBackwardExperts& experts = experts_of(params, task);
    const int32_t first = self.first_row(), row = first + static_cast<int32_t>(self.lane % kWarpRows);
    const bool is_mine = self.lane < kWarpRows && row < task.valid_rows;
    const int32_t num_partials = steps_of(inner_of(params, task));
    float* home = nullptr;
    float sum = 0.0f;
    if (is_mine) {
        home = weight_grad_home(params, task, row);
        sum = sum_partials(rows.weight_partials + static_cast<int64_t>(task.row + row) * num_partials,
                           num_partials);
    }
    if (experts.b_down != nullptr) {
        const bf16* b = experts.b_down + task.expert * experts.b_down_stride;
        const bf16* dout =
            reinterpret_cast<const bf16*>(params.ring_dout) + (task.row + first) * params.shape.sizes.hidden;
        const int32_t left = task.valid_rows - first;
        const int32_t valid = left < static_cast<int32_t>(kWarpRows) ? left : static_cast<int32_t>(kWarpRows);
        for (int32_t begin = 0; begin < valid; begin += kDotRows) {
            const bf16* batch[kDotRows];
            float products[kDotRows];
#pragma unroll
            for (int32_t r = 0; r < kDotRows; ++r) {
                // Behind the last row, that one again, for nobody.
                const int32_t at = begin + r < valid ? begin + r : valid - 1;
                batch[r] = dout + at * params.shape.sizes.hidden;
            }
            dots(batch, b, hidden_of(params), self.lane, products);
#pragma unroll
            for (int32_t r = 0; r < kDotRows; ++r) {
                if (static_cast<int32_t>(self.lane) == begin + r && begin + r < valid)
                    sum = sum + products[r];
            }
        }
        ptx::fence_proxy_async_global();  // the ring row is written again by bulk stores
    }
    if (is_mine) ptx::store_global(home, sum);
}

// Bias gradients.

/// A thread's two neighbouring columns.
struct Columns {
    float low, high;
};

template <typename T>
MOK_DEVICE Columns load_columns(const T* at) {
    if constexpr (sizeof(T) == 4) {
        return {ptx::load_global(at), ptx::load_global(at + 1)};
    } else {
        const uint32_t pair = ptx::load_global(reinterpret_cast<const uint32_t*>(at));
        return {ptx::low_bf16(pair), ptx::high_bf16(pair)};
    }
}

MOK_DEVICE void store_columns(float* at, const Columns& sums) {
    ptx::store_global(at, sums.low);
    ptx::store_global(at + 1, sums.high);
}

MOK_DEVICE void store_columns(bf16* at, const Columns& sums) {
    ptx::store_global(reinterpret_cast<uint32_t*>(at), ptx::pack_bf16(sums.low, sums.high));
}

template <typename T>
MOK_DEVICE void store_bias(T* at, Columns sums, bool adds) {
    if (adds) {
        const Columns before = load_columns(at);
        sums = {before.low + sums.low, before.high + sums.high};
    }
    store_columns(at, sums);
}

/// One stage of 64 rows or fewer onto the partial sums: w x for b_down's, x for the others. `weight` holds
/// rows lane and lane + 32.
template <bool kWeighted>
MOK_DEVICE void add_rows(uint32_t box, int32_t rows, uint32_t lane, const float (&weight)[2],
                         Columns& partial) {
    const uint32_t piece = lane / 4, at = 4 * (lane % 4);
#pragma unroll 8
    for (int32_t row = 0; row < static_cast<int32_t>(kTileK); ++row) {
        float w = 1.0f;
        if constexpr (kWeighted) {
            w = ptx::shuffle(row < static_cast<int32_t>(ptx::kWarpThreads) ? weight[0] : weight[1],
                             static_cast<uint32_t>(row) % ptx::kWarpThreads);
        }
        if (row >= rows) continue;
        const uint32_t line = static_cast<uint32_t>(row);
        const auto pair =
            ptx::load_shared<uint32_t>(box + line * kLineBytes + 16 * (piece ^ (line % 8)) + at);
        partial.low = ptx::fused_multiply_add(w, ptx::low_bf16(pair), partial.low);
        partial.high = ptx::fused_multiply_add(w, ptx::high_bf16(pair), partial.high);
    }
}

/// The first part's warps: 64 columns each, in partial sums over blocks of 128 rows.
MOK_DEVICE void finish_bias(const MoeBackwardParams& params, const Shared& shared, const BackwardTask& task,
                            Consumer& self, ptx::Deadline& deadline) {
    constexpr int32_t kStepsOfBlock = kTileM / kTileK;
    const int32_t matrix = matrix_of(task);
    const bool is_weighted = matrix == Matrix::kDown;
    const int32_t column = task.column + static_cast<int32_t>(self.part_warp * kBoxColumns + 2 * self.lane);
    const int32_t columns = gradient_rows(params, task);
    // A box that begins outside is not loaded; its warp only keeps the stages moving.
    const bool has_box = task.column + static_cast<int32_t>(self.part_warp * kBoxColumns) < columns;
    const bool is_inside = column < columns;
    float* accumulator = params.accumulators.bias[matrix] + column;
    Columns sum{}, partial{};
    if (has(task, kContinues) && is_inside) sum = load_columns(accumulator);
    StepRows ring = step_rows(params, task, true);
    for (int32_t step = 0; step < task.steps; ++step) {
        const int32_t rows = task.row - step * static_cast<int32_t>(kTileK);
        float weight[2] = {};
        if (is_weighted) {
            const float* weights = params.row_weights + ring.row;
            const int32_t own = static_cast<int32_t>(self.lane), next = own + 32;
            if (own < rows) weight[0] = ptx::load_global(weights + own);
            if (next < rows) weight[1] = ptx::load_global(weights + next);
        }
        ptx::mbar_wait(shared.stage_full(self.stages.slot), self.stages.parity, deadline);
        const uint32_t box = stage_box(shared, self.stages.slot, kParts + self.part_warp);
        if (has_box) {
            if (is_weighted) {
                add_rows<true>(box, rows, self.lane, weight, partial);
            } else {
                add_rows<false>(box, rows, self.lane, weight, partial);
            }
        }
        release_stage(shared, self.stages, self.lane);
        ring.next();
        if (step % kStepsOfBlock == kStepsOfBlock - 1 || step + 1 == task.steps) {
            sum = {sum.low + partial.low, sum.high + partial.high};
            partial = {};
        }
    }
    if (is_inside) {
        const MoeGradients& gradients = gradients_of(params, task);
        const int64_t at = task.expert * gradients.bias_stride[matrix] + column;
        if (has(task, kUnfinished)) {
            store_columns(accumulator, sum);
        } else if ((gradients.float32 >> (schedule::kNumMatrices + matrix) & 1) != 0) {
            store_bias(static_cast<float*>(gradients.bias[matrix]) + at, sum, params.accumulate);
        } else {
            store_bias(static_cast<bf16*>(gradients.bias[matrix]) + at, sum, params.accumulate);
        }
    }
}

}  // namespace mok::moe_backward_detail
