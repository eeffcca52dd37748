// The rows of one chunk: which ring row comes from where, goes where, and belongs to which expert.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/cpu/exchange.h"
#include "csrc/layout/plan_host.h"

namespace mok::cpu {

/// Rows of one expert that lie in the ring together: a whole segment or one cut of it.
struct Piece {
    int32_t expert;  // local index
    int64_t row;     // first ring row
    int64_t rows;    // valid rows
    bool first;      // starts its segment
    bool last;       // ends its segment
    bool cut() const { return !(first && last); }
};

/// Per ring row: source rows at the home rank, destinations there, routing weight. Null and 0 on padding.
struct RowTable {
    const char** x;
    const char** dout;
    char** home;      // row of the home rank's return buffer
    float** dweight;  // slot of the home rank's router-weight gradients
    float* weight;

    static int64_t bytes(int64_t rows);
    /// Lays the table out in a buffer of bytes(rows).
    static RowTable place(void* buffer, int64_t rows);
};

struct Chunk {
    int64_t begin;  // padded rows of the plan
    int64_t end;
    std::vector<Piece> pieces;
};

/// The chunks of a plan, in order; pieces without rows are left out.
std::vector<Chunk> make_chunks(const Plan& plan, int64_t ring_rows);

/// Fills rows [0, chunk.end - chunk.begin) of the table.
void fill_row_table(const Plan& plan, const Chunk& chunk, const std::vector<RankView>& ranks, int64_t top_k,
                    int64_t row_bytes, bool backward, const RowTable& table);

}  // namespace mok::cpu
