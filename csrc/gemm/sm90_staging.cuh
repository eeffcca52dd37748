// From accumulators to memory: a consumer warpgroup rounds its part to pairs of BF16, writes them to its
// staging buffer by stmatrix, and the store warp sends them on.
//
// A part's words: word 2 j + h of a thread holds columns 8 j + 2 (lane % 4) and the next of row
// 16 warp + lane / 4 + 8 h.
#pragma once

#include "csrc/gemm/sm90_shared.cuh"
#include "csrc/layout/types.h"

namespace mok::sm90 {

/// rn(acc), two a word.
MOK_DEVICE void round_part(const float (&accumulators)[kAccumulators], uint32_t (&words)[kWords]) {
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
        words[i] = ptx::pack_bf16(accumulators[2 * i], accumulators[2 * i + 1]);
    }
}

/// acc += bias for the 8-column blocks [kFirst, kFirst + kBlocks): `bias` is the row's first column's BF16,
/// `columns` how many columns there are.
template <uint32_t kFirst, uint32_t kBlocks>
MOK_DEVICE void add_bias(const bf16* bias, int32_t columns, uint32_t lane,
                         float (&accumulators)[kAccumulators]) {
    const int32_t column = static_cast<int32_t>(lane % 4 * 2);
#pragma unroll
    for (uint32_t j = 0; j < kBlocks; ++j) {
        uint32_t pair = 0;
        const int32_t at = column + static_cast<int32_t>(8 * j);
        if (at < columns) pair = ptx::load_global(reinterpret_cast<const uint32_t*>(bias + at));
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) {
            float& value = accumulators[4 * (kFirst + j) + i];
            value = value + (i % 2 == 0 ? ptx::low_bf16(pair) : ptx::high_bf16(pair));
        }
    }
}

/// Rows from `valid_rows` on (of the part) become zeros.
MOK_DEVICE void zero_padding(int32_t valid_rows, uint32_t part_warp, uint32_t lane,
                             uint32_t (&words)[kWords]) {
    const int32_t row = static_cast<int32_t>(part_warp * 16 + lane / 4);
#pragma unroll
    for (uint32_t i = 0; i < kWords; ++i) {
        if (row + static_cast<int32_t>(8 * (i % 2)) >= valid_rows) words[i] = 0;
    }
}

namespace staging_detail {

/// 8 rows (half `h` of the warp's 16) x 32 columns from 8-column block `j` on.
template <uint32_t kJ, uint32_t kH>
MOK_DEVICE void store_block(uint32_t address, const uint32_t (&words)[kWords]) {
    const uint32_t matrices[4] = {words[2 * kJ + kH], words[2 * kJ + 2 + kH], words[2 * kJ + 4 + kH],
                                  words[2 * kJ + 6 + kH]};
    ptx::store_matrix_x4(address, matrices);
}

}  // namespace staging_detail

/// Words of the 64-column boxes [kFirst, kFirst + kBoxes) as boxes that TMA stores: box i of them 8 KiB
/// behind box i - 1.
template <uint32_t kFirst, uint32_t kBoxes>
MOK_DEVICE void stage_boxes(uint32_t staging, uint32_t part_warp, uint32_t lane,
                            const uint32_t (&words)[kWords]) {
    // Lane l addresses row l % 8 of the matrix of columns 8 (l / 8) ..; rows 8 apart have the same swizzle.
    const uint32_t row = staging + (part_warp * 16 + lane % 8) * kLineBytes;
    const uint32_t left = ((lane / 8) ^ (lane % 8)) * 16, right = ((lane / 8 + 4) ^ (lane % 8)) * 16;
    const auto box = [&]<uint32_t kBox>() {
        constexpr uint32_t kJ = (kFirst + kBox) * 8;
        const uint32_t at = row + kBox * kRowBoxBytes;
        staging_detail::store_block<kJ, 0>(at + left, words);
        staging_detail::store_block<kJ, 1>(at + left + 8 * kLineBytes, words);
        staging_detail::store_block<kJ + 4, 0>(at + right, words);
        staging_detail::store_block<kJ + 4, 1>(at + right + 8 * kLineBytes, words);
    };
    box.template operator()<0>();
    if constexpr (kBoxes > 1) box.template operator()<1>();
    if constexpr (kBoxes > 2) {
        static_assert(kBoxes == 4);
        box.template operator()<2>();
        box.template operator()<3>();
    }
}

/// All 256 columns as rows of kStagedRowBytes.
MOK_DEVICE void stage_rows(uint32_t staging, uint32_t part_warp, uint32_t lane,
                           const uint32_t (&words)[kWords]) {
    const uint32_t at = staging + (part_warp * 16 + lane % 8) * kStagedRowBytes + lane / 8 * 16;
    const auto quarter = [&]<uint32_t kQuarter>() {
        constexpr uint32_t kJ = kQuarter * 8;
        staging_detail::store_block<kJ, 0>(at + kQuarter * 128, words);
        staging_detail::store_block<kJ, 1>(at + kQuarter * 128 + 8 * kStagedRowBytes, words);
        staging_detail::store_block<kJ + 4, 0>(at + kQuarter * 128 + 64, words);
        staging_detail::store_block<kJ + 4, 1>(at + kQuarter * 128 + 64 + 8 * kStagedRowBytes, words);
    };
    quarter.template operator()<0>();
    quarter.template operator()<1>();
    quarter.template operator()<2>();
    quarter.template operator()<3>();
}

/// Before a consumer warp writes to its part's staging buffer. When the time is up it goes on: what is staged
/// then goes nowhere.
MOK_DEVICE void begin_staging(const Shared& shared, const StagingCursor& cursor, uint32_t part,
                              ptx::Deadline& deadline) {
    ptx::mbar_wait(shared.staging_empty(part), cursor.parity ^ 1, deadline);
}

/// After it: hands the buffer to the store warp.
MOK_DEVICE void end_staging(const Shared& shared, StagingCursor& cursor, uint32_t part, uint32_t lane) {
    ptx::fence_proxy_async_shared();
    ptx::sync_warp();
    if (lane == 0) ptx::mbar_arrive(shared.staged(part));
    cursor.next();
}

/// The store warp waits for a part's buffer; false in all lanes when the time is up.
MOK_DEVICE bool wait_staged(const Shared& shared, const StagingCursor& cursor, uint32_t part,
                            ptx::Deadline& deadline) {
    ptx::mbar_wait(shared.staged(part), cursor.parity, deadline);
    return !ptx::any_lane(deadline.expired);
}

// The store warp issues the stores of all parts of a tile before it waits for the first: on sm_90 the wait
// for a store's reads is the instruction that waits for its writes, over a link a round trip. That the first
// part's warps get their buffer back behind the second's cannot end in a circle: what the second still has to
// multiply is in stages that the first have left.

/// Calls body(part), which issues stores from the part's buffer, for each part of the tile once it is staged.
template <typename Body>
MOK_DEVICE void store_staged(const Shared& shared, const StagingCursor (&cursors)[kParts], uint32_t parts,
                             ptx::Deadline& deadline, const Body& body) {
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part) {
        if (deadline.expired || part >= parts) continue;
        if (!wait_staged(shared, cursors[part], part, deadline)) {
            deadline.expired = true;
            continue;
        }
        body(part);
        ptx::bulk_commit();
    }
}

/// After it: gives each buffer back once it is read.
MOK_DEVICE void release_staging(const Shared& shared, StagingCursor (&cursors)[kParts], uint32_t parts,
                                uint32_t lane, const ptx::Deadline& deadline) {
    static_assert(kParts == 2);
    if (deadline.expired) return;
#pragma unroll
    for (uint32_t part = 0; part < kParts; ++part) {
        if (part >= parts) continue;
        if (part + 1 < parts) {
            ptx::bulk_wait_read<1>();
        } else {
            ptx::bulk_wait_read<0>();
        }
        ptx::sync_warp();
        if (lane == 0) ptx::mbar_arrive(shared.staging_empty(part));
        cursors[part].next();
    }
}

// One lane issues all of a part's stores: copies of single lanes make a loop over the lanes, of 75 to 95
// cycles each. elect_one, because ptxas knows of it that one lane is left. Which one does not matter as long
// as all lanes commit and wait.

/// The whole warp stores kBoxes boxes side by side, those that do not lie outside the matrix.
template <uint32_t kBoxes>
MOK_DEVICE void store_boxes(const ptx::TensorMap* map, int32_t column, int32_t row, int32_t num_columns,
                            uint32_t source) {
    if (ptx::elect_one()) {
#pragma unroll
        for (uint32_t box = 0; box < kBoxes; ++box) {
            const int32_t at = column + static_cast<int32_t>(box * kBoxColumns);
            if (at < num_columns) ptx::tma_store_2d(map, at, row, source + box * kRowBoxBytes);
        }
    }
}

}  // namespace mok::sm90
