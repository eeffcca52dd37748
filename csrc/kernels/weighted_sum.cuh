// The combine epilogue: out_t = rn(w_s y_s + w_0 y_0 + ... + w_{K-1} y_{K-1}), one FP32 FMA chain from +0 in
// this order, over rows that have come home; without weights the same for dx.
//
// One warp takes 512 bytes of one token's columns at a time: each lane has 16 bytes of kBatch rows in flight
// before it uses the first, and the ids and weights of the warp's next piece are loaded meanwhile. Pieces of
// a token lie side by side in neighbouring warps. Rows are read once, so they leave L2 first. A choice that
// is no route is neither read nor multiplied. Everything read was written before the kernel began, unless the
// workspace has ended: then warps leave.
#pragma once

#include "csrc/layout/types.h"
#include "csrc/ptx/ptx.h"

namespace mok {

struct WeightedSumParams {
    const void* rows;            // T [tokens * top_k, hidden]
    const void* shared_rows;     // T [tokens, hidden]; nullptr: no shared expert
    const float* shared_weight;  // [tokens]; nullptr: 1
    const int32_t* ids;          // [tokens * top_k], negative: no route
    const float* weights;        // [tokens * top_k]; nullptr: 1
    void* out;                   // T [tokens, hidden]
    int64_t rows_stride;         // bytes
    int64_t shared_stride;       // bytes
    int64_t out_stride;          // bytes
    uint32_t tokens;
    uint32_t top_k;
    uint32_t hidden;
    uint32_t pieces_per_token;  // ceil(hidden * sizeof(T) / kPieceBytes)
    const uint32_t* expired;    // non-zero: leave; nullptr: never
};

inline constexpr uint32_t kWeightedSumThreads = 256;
inline constexpr uint32_t kWeightedSumBlocksPerSm = 3;  // at 4 the 64 registers would spill
inline constexpr uint32_t kPieceBytes = 512;

namespace weighted_sum_detail {

// Rows in flight: 8 x 16 bytes x 768 threads are 96 KiB an SM, more than twice bandwidth times latency of
// HBM3e.
constexpr uint32_t kBatch = 8;

template <typename T>
inline constexpr uint32_t kColumns = 16 / sizeof(T);

MOK_DEVICE void add_row(float (&sum)[8], const ptx::Words4& row, float weight, bf16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[2 * i] = ptx::fused_multiply_add(weight, ptx::low_bf16(row.word[i]), sum[2 * i]);
        sum[2 * i + 1] = ptx::fused_multiply_add(weight, ptx::high_bf16(row.word[i]), sum[2 * i + 1]);
    }
}

MOK_DEVICE void add_row(float (&sum)[4], const ptx::Words4& row, float weight, float) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        sum[i] = ptx::fused_multiply_add(weight, ptx::bits_float(row.word[i]), sum[i]);
    }
}

MOK_DEVICE ptx::Words4 rounded(const float (&sum)[8], bf16) {
    ptx::Words4 words;
#pragma unroll
    for (int i = 0; i < 4; ++i) words.word[i] = ptx::pack_bf16(sum[2 * i], sum[2 * i + 1]);
    return words;
}

MOK_DEVICE ptx::Words4 rounded(const float (&sum)[4], float) {
    ptx::Words4 words;
#pragma unroll
    for (int i = 0; i < 4; ++i) words.word[i] = ptx::float_bits(sum[i]);
    return words;
}

/// Lane j's choice of one batch of a token.
struct Choice {
    int32_t id;
    float weight;
};

MOK_DEVICE Choice load_choice(const WeightedSumParams& params, uint32_t token, uint32_t first,
                              uint32_t lane) {
    Choice choice{-1, 1.0f};
    const uint32_t k = first + lane;
    if (lane < kBatch && k < params.top_k && token < params.tokens) {
        const int64_t slot = static_cast<int64_t>(token) * params.top_k + k;
        choice.id = ptx::load_global(params.ids + slot);
        if (params.weights != nullptr) choice.weight = ptx::load_global(params.weights + slot);
    }
    return choice;
}

}  // namespace weighted_sum_detail

template <typename T>
__global__ void __launch_bounds__(kWeightedSumThreads, kWeightedSumBlocksPerSm)
    weighted_sum_kernel(const __grid_constant__ WeightedSumParams params) {
    using namespace weighted_sum_detail;
    const uint32_t lane = ptx::lane_idx();
    const uint32_t num_warps = ptx::num_blocks() * (kWeightedSumThreads / ptx::kWarpThreads);
    const uint32_t first_piece =
        ptx::block_idx() * (kWeightedSumThreads / ptx::kWarpThreads) + ptx::warp_idx();
    // (token, piece) advances by num_warps pieces without a division.
    const uint32_t token_step = num_warps / params.pieces_per_token;
    const uint32_t piece_step = num_warps % params.pieces_per_token;
    uint32_t token = first_piece / params.pieces_per_token;
    uint32_t piece = first_piece % params.pieces_per_token;
    Choice next = load_choice(params, token, 0, lane);
    if (params.expired != nullptr && ptx::any_lane(ptx::ld_relaxed_gpu(params.expired) != 0)) return;

    while (token < params.tokens) {
        uint32_t next_token = token + token_step;
        uint32_t next_piece = piece + piece_step;
        if (next_piece >= params.pieces_per_token) {
            next_piece -= params.pieces_per_token;
            ++next_token;
        }
        const uint32_t column = (piece * ptx::kWarpThreads + lane) * kColumns<T>;
        const bool is_inside = column < params.hidden;
        const int64_t column_bytes = static_cast<int64_t>(column) * static_cast<int64_t>(sizeof(T));

        float sum[kColumns<T>] = {};
        ptx::Words4 shared_value = {};
        float shared_weight = 1.0f;
        if (params.shared_rows != nullptr && is_inside) {
            const char* row = static_cast<const char*>(params.shared_rows) + token * params.shared_stride;
            shared_value = ptx::load_global_v4_hint(row + column_bytes, ptx::kEvictFirst);
            if (params.shared_weight != nullptr)
                shared_weight = ptx::load_global(params.shared_weight + token);
        }

        for (uint32_t first = 0; first < params.top_k; first += kBatch) {
            const Choice choice = next;
            const bool is_last = first + kBatch >= params.top_k;
            const uint32_t routes = ptx::ballot(choice.id >= 0);
            const char* row = static_cast<const char*>(params.rows) +
                              (static_cast<int64_t>(token) * params.top_k + first) * params.rows_stride +
                              column_bytes;
            ptx::Words4 values[kBatch];
#pragma unroll
            for (uint32_t k = 0; k < kBatch; ++k) {
                if (is_inside && (routes >> k & 1) != 0) {
                    values[k] = ptx::load_global_v4_hint(row + k * params.rows_stride, ptx::kEvictFirst);
                }
            }
            next = load_choice(params, is_last ? next_token : token, is_last ? 0 : first + kBatch, lane);
            if (first == 0 && params.shared_rows != nullptr) add_row(sum, shared_value, shared_weight, T{});
#pragma unroll
            for (uint32_t k = 0; k < kBatch; ++k) {
                const float weight = ptx::shuffle(choice.weight, k);
                if ((routes >> k & 1) != 0) add_row(sum, values[k], weight, T{});
            }
        }
        if (is_inside) {
            char* out = static_cast<char*>(params.out) + token * params.out_stride;
            ptx::store_global_v4(out + column_bytes, rounded(sum, T{}));
        }
        token = next_token;
        piece = next_piece;
    }
}

}  // namespace mok
