// The epilogue of a dhidden tile, a chunk of 64 columns at a time: from the accumulators a and the chunk's
// gate and up come
//   dg = rn(w a dp/dg), du = rn(w a dp/du), in place of gate and up; h' = rn(w p); sum over the chunk of p a
// About 20 instructions an element (docs/performance/backward.md). Nothing waits but for the chunk's stage.
#pragma once

#include "csrc/gemm/activation_backward.cuh"
#include "csrc/gemm/sm90_chunks.cuh"

namespace mok::sm90 {

/// Boxes of a dhidden chunk's stage: gate (then dg), up (then du), h', each of both parts.
inline constexpr uint32_t kGateBox = 0, kUpBox = kParts, kHiddenBox = 2 * kParts;

/// Where a part leaves the sum of p a of one of its rows over a chunk: in its staging buffer, which the
/// chunks do not need. Not in global memory: the fence before a chunk is handed over would wait for the
/// stores.
MOK_DEVICE uint32_t staged_sum(const Shared& shared, uint32_t part, uint32_t row, uint32_t chunk) {
    return shared.staging(part) + (row * kChunks + chunk) * 4;
}

/// Where the store warp has left w of a part's row for it, behind the sums.
MOK_DEVICE uint32_t staged_weight(const Shared& shared, uint32_t part, uint32_t row) {
    return staged_sum(shared, part, kPartRows, 0) + row * 4;
}
static_assert(kPartRows * (kChunks + 1) * 4 <= kStagingBytes);

/// A consumer thread's two rows of its part, 8 apart.
struct RowPair {
    float weight[2];
    bool is_valid[2];
};

namespace dhidden_detail {

/// Two columns: words of dg, du and h', and p a onto the sums of even and odd columns.
template <ActivationForm kForm>
MOK_DEVICE void differentiate(float weight, float limit, float a_low, float a_high, uint32_t& gate,
                              uint32_t& up, uint32_t& hidden, float (&sums)[2]) {
    const Activated low = activate_with_derivatives<kForm>(ptx::low_bf16(gate), ptx::low_bf16(up), limit);
    const Activated high = activate_with_derivatives<kForm>(ptx::high_bf16(gate), ptx::high_bf16(up), limit);
    const float q_low = weight * a_low, q_high = weight * a_high;
    gate = ptx::pack_bf16(q_low * low.dp_dg, q_high * high.dp_dg);
    up = ptx::pack_bf16(q_low * low.dp_du, q_high * high.dp_du);
    hidden = ptx::pack_bf16(weight * low.p, weight * high.p);
    sums[0] = ptx::fused_multiply_add(low.p, a_low, sums[0]);
    sums[1] = ptx::fused_multiply_add(high.p, a_high, sums[1]);
}

/// The sums of a row's columns over the four lanes that share it, in the executor's order: column c went to
/// chain c % 8, chains i and i + 4 are added, then i and i + 2, then the last two. Right in lanes 4 i.
MOK_DEVICE float sum_chains(float (&sums)[2]) {
#pragma unroll
    for (uint32_t mask = 2; mask > 0; mask /= 2) {
        sums[0] = sums[0] + ptx::shuffle_xor(sums[0], mask);
        sums[1] = sums[1] + ptx::shuffle_xor(sums[1], mask);
    }
    return sums[0] + sums[1];
}

}  // namespace dhidden_detail

/// One warp's 16 rows of a chunk in `stage`, which has landed, with the first chunk's accumulators; `sums`:
/// of the thread's two rows over the chunk, right in lanes 4 i. With kRagged, rows that are not valid become
/// zeros: 48 selects that most tiles do without.
template <ActivationForm kForm, bool kRagged>
MOK_DEVICE void finish_dhidden_chunk(const Shared& shared, uint32_t stage, uint32_t part, uint32_t part_warp,
                                     uint32_t lane, const RowPair& rows, float limit,
                                     const float (&accumulators)[kAccumulators], float (&sums)[2]) {
    // As stage_boxes: lane l addresses row l % 8 of the matrix of columns 8 (l / 8) ...
    const uint32_t first = stage_box(shared, stage, part) + (part_warp * 16 + lane % 8) * kLineBytes +
                           ((lane / 8) ^ (lane % 8)) * 16;
    float chains[2][2] = {};
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
            const uint32_t at = (first ^ (64 * half)) + h * 8 * kLineBytes;
            uint32_t gate[4], up[4], hidden[4];
            ptx::load_matrix_x4(at + kGateBox * kRowBoxBytes, gate);
            ptx::load_matrix_x4(at + kUpBox * kRowBoxBytes, up);
#pragma unroll
            for (uint32_t i = 0; i < 4; ++i) {
                const uint32_t word = 4 * (4 * half + i) + 2 * h;
                dhidden_detail::differentiate<kForm>(rows.weight[h], limit, accumulators[word],
                                                     accumulators[word + 1], gate[i], up[i], hidden[i],
                                                     chains[h]);
            }
            if (kRagged && !rows.is_valid[h]) {
#pragma unroll
                for (uint32_t i = 0; i < 4; ++i) gate[i] = up[i] = hidden[i] = 0;
            }
            ptx::store_matrix_x4(at + kGateBox * kRowBoxBytes, gate);
            ptx::store_matrix_x4(at + kUpBox * kRowBoxBytes, up);
            ptx::store_matrix_x4(at + kHiddenBox * kRowBoxBytes, hidden);
        }
    }
    sums[0] = dhidden_detail::sum_chains(chains[0]);
    sums[1] = dhidden_detail::sum_chains(chains[1]);
}

}  // namespace mok::sm90
