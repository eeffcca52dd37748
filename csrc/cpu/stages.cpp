// What the stages share: tiling, per-worker scratch, dispatch and combine.
#include "csrc/cpu/stages.h"

#include <algorithm>
#include <cstring>

#include "csrc/cpu/stages_tiling.h"

namespace mok::cpu {

Stages::Stages(const KernelTable& kernels, const LayerShape& shape, const ThreadPool& threads)
    : kernels_(kernels), shape_(shape), elem_(dtype_bytes(shape.compute)), threads_(threads) {}

void Stages::set_worker_scratch(char* scratch, int64_t bytes_per_worker) {
    scratch_ = scratch;
    scratch_bytes_ = bytes_per_worker;
}

int64_t Stages::column_block_limit(int64_t k, int64_t matrices) const {
    int64_t block = kMaxColumnBlock;
    while (block > kMinColumnBlock &&
           matrices * kernels_.packed_b_bytes(shape_.compute, block, k) > kPackBudget) {
        block /= 2;
    }
    return block;
}

Stages::Tiling Stages::tile(int64_t columns, int64_t k, int64_t matrices,
                            const std::vector<Piece>& pieces) const {
    const int64_t wanted = kTasksPerWorker * threads_.count;
    const int64_t num_pieces = static_cast<int64_t>(pieces.size());
    Tiling tiling{column_block_limit(k, matrices), 0, 1};
    while (tiling.column_block > kMinColumnBlock &&
           num_pieces * ceil_div(columns, tiling.column_block) < wanted) {
        tiling.column_block /= 2;
    }
    tiling.num_column_blocks = ceil_div(columns, tiling.column_block);
    int64_t most_rows = 1;
    for (const Piece& piece : pieces) most_rows = std::max(most_rows, piece.rows);
    if (threads_.count > 1) {
        const int64_t tasks = std::max<int64_t>(1, num_pieces * tiling.num_column_blocks);
        tiling.row_groups = std::clamp(ceil_div(wanted, tasks), int64_t{1}, ceil_div(most_rows, kRowBlock));
    }
    return tiling;
}

int64_t Stages::stage_bytes(int64_t k, int64_t matrices, int64_t tile_rows) const {
    const int64_t block = column_block_limit(k, matrices);
    return round_up(matrices * kernels_.packed_b_bytes(shape_.compute, block, k), kScratchAlign) +
           round_up<int64_t>(matrices * tile_rows * block * sizeof(float), kScratchAlign) +
           round_up(kernels_.gemm_scratch_bytes(shape_.compute, k), kScratchAlign);
}

int64_t Stages::worker_bytes(const ExpertSet& experts, bool backward) const {
    const int64_t hidden = experts.hidden, intermediate = experts.intermediate;
    int64_t bytes = std::max(stage_bytes(hidden, 2, kRowBlock), stage_bytes(intermediate, 1, kRowBlock));
    if (backward) {
        bytes = std::max(bytes, stage_bytes(hidden, 1, kRowBlock));
        bytes = std::max(bytes, stage_bytes(intermediate, 2, kRowBlock));
        bytes = std::max(bytes, stage_bytes(kGradientRows, 1, kGradientOutRows));
        const int64_t widest = std::max(hidden, intermediate);
        bytes = std::max<int64_t>(bytes, 2 * round_up<int64_t>(widest * sizeof(float), kScratchAlign));
    }
    return round_up(bytes, kScratchAlign);
}

Stages::Worker Stages::worker(int64_t index, int64_t packed_bytes, int64_t tile_floats) const {
    Worker worker{};
    worker.packed = scratch_ + index * scratch_bytes_;
    worker.tile = reinterpret_cast<float*>(worker.packed + round_up(packed_bytes, kScratchAlign));
    worker.gemm_scratch =
        reinterpret_cast<char*>(worker.tile) + round_up<int64_t>(tile_floats * sizeof(float), kScratchAlign);
    return worker;
}

void Stages::gather(const char* const* sources, int64_t num_rows, int64_t row_bytes, char* target) const {
    for_each_task(threads_, ceil_div(num_rows, kGatherRows), [&](int64_t task, int64_t) {
        const int64_t end = std::min(num_rows, (task + 1) * kGatherRows);
        for (int64_t row = task * kGatherRows; row < end; ++row) {
            char* to = target + row * row_bytes;
            if (sources[row] == nullptr) {
                std::memset(to, 0, row_bytes);
            } else {
                std::memcpy(to, sources[row], row_bytes);
            }
        }
    });
}

void Stages::zero_rows(char* target, int64_t bytes) const {
    constexpr int64_t kSpan = int64_t{1} << 20;
    for_each_task(threads_, ceil_div(bytes, kSpan), [&](int64_t task, int64_t) {
        std::memset(target + task * kSpan, 0, std::min(kSpan, bytes - task * kSpan));
    });
}

void Stages::combine(const RankView& own, const char* shared_rows, const float* shared_weight,
                     const float* weights, char* out) const {
    const int64_t top_k = shape_.top_k;
    const int64_t row_bytes = shape_.hidden * elem_;
    for_each_task(threads_, ceil_div(own.num_tokens, kGatherRows), [&](int64_t task, int64_t) {
        std::vector<const void*> rows(top_k + 1);
        std::vector<float> factors(top_k + 1);
        const int64_t end = std::min(own.num_tokens, (task + 1) * kGatherRows);
        for (int64_t token = task * kGatherRows; token < end; ++token) {
            int64_t count = 0;
            if (shared_rows != nullptr) {
                rows[count] = shared_rows + token * row_bytes;
                factors[count++] = shared_weight ? shared_weight[token] : 1.0f;
            }
            for (int64_t choice = 0; choice < top_k; ++choice) {
                const int64_t slot = token * top_k + choice;
                if (own.ids[slot] < 0) continue;  // no route: skipped, its weight may be NaN
                rows[count] = own.rows + slot * row_bytes;
                factors[count++] = weights ? weights[slot] : 1.0f;
            }
            kernels_.weighted_sum(shape_.compute, rows.data(), weights ? factors.data() : nullptr, count,
                                  out + token * row_bytes, shape_.hidden);
        }
    });
}

void Stages::convert_biases(const ExpertSet& experts, float* out) const {
    const auto convert = [&](const Bias& bias, int64_t columns, int64_t offset) {
        if (bias.data == nullptr) return;
        for (int64_t expert = 0; expert < experts.num_experts; ++expert) {
            float* row = out + expert * (2 * experts.intermediate + experts.hidden) + offset;
            for (int64_t column = 0; column < columns; ++column) {
                const int64_t index = expert * bias.expert_stride + column;
                if (bias.dtype == DType::kBFloat16) {
                    row[column] = to_float(static_cast<const bf16*>(bias.data)[index]);
                } else {
                    const float value = static_cast<const float*>(bias.data)[index];
                    row[column] = shape_.compute == DType::kBFloat16 ? to_float(round_to_bf16(value)) : value;
                }
            }
        }
    };
    convert(experts.weights->b_gate, experts.intermediate, 0);
    convert(experts.weights->b_up, experts.intermediate, experts.intermediate);
    convert(experts.weights->b_down, experts.hidden, 2 * experts.intermediate);
}

}  // namespace mok::cpu
