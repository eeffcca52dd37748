// Tile sizes of the CPU stages and the loop over tiles. They decide speed only, never bits.
#pragma once

#include <algorithm>
#include <cstdint>

#include "csrc/cpu/stages.h"

namespace mok::cpu {

constexpr int64_t kScratchAlign = 64;
constexpr int64_t kRowBlock = 128;        // rows per product: its A stays in L2
constexpr int64_t kMaxColumnBlock = 256;  // wide enough that packing A again per block is a few percent
constexpr int64_t kMinColumnBlock = kDweightBlock;  // blocks start at multiples of the router-gradient blocks
constexpr int64_t kPackBudget = int64_t{2} << 20;   // packed weights per worker, a share of L3
constexpr int64_t kTasksPerWorker = 4;
constexpr int64_t kGatherRows = 16;
constexpr int64_t kGradientRows =
    1024;  // contraction rows of a weight gradient packed at once; a multiple of 128
constexpr int64_t kGradientOutRows = 512;  // its FP32 tile (512 x 256) stays in L2

template <typename Body>
void Stages::for_each_tile(const std::vector<Piece>& pieces, int64_t columns, int64_t k, int64_t matrices,
                           const Body& body) const {
    const Tiling tiling = tile(columns, k, matrices, pieces);
    const int64_t tasks_per_piece = tiling.num_column_blocks * tiling.row_groups;
    for_each_task(
        threads_, static_cast<int64_t>(pieces.size()) * tasks_per_piece, [&](int64_t task, int64_t worker) {
            const Piece& piece = pieces[task / tasks_per_piece];
            const int64_t first_column = task % tasks_per_piece / tiling.row_groups * tiling.column_block;
            const int64_t group = task % tiling.row_groups;
            const int64_t group_rows = round_up(ceil_div(piece.rows, tiling.row_groups), kRowBlock);
            const int64_t begin = group * group_rows;
            const int64_t end = std::min(piece.rows, begin + group_rows);
            if (begin >= end) return;
            body(piece, first_column, std::min(tiling.column_block, columns - first_column),
                 piece.row + begin, end - begin, worker);
        });
}

/// One expert's matrix as the B of C = A B^T (its rows are the columns of C), from column block `first`.
inline Operand rows_as_columns(const Matrix& matrix, int64_t expert, int64_t first) {
    const int64_t offset = expert * matrix.expert_stride + first * matrix.row_stride;
    return Operand{static_cast<const char*>(matrix.data) + offset * dtype_bytes(matrix.dtype), matrix.dtype,
                   matrix.row_stride, 1};
}

/// One expert's matrix as the B of C = A B (its columns are the columns of C).
inline Operand columns_as_columns(const Matrix& matrix, int64_t expert, int64_t first) {
    const int64_t offset = expert * matrix.expert_stride + first;
    return Operand{static_cast<const char*>(matrix.data) + offset * dtype_bytes(matrix.dtype), matrix.dtype,
                   1, matrix.row_stride};
}

}  // namespace mok::cpu
