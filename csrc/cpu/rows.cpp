#include "csrc/cpu/rows.h"

#include <algorithm>

namespace mok::cpu {

int64_t RowTable::bytes(int64_t rows) {
    return rows * (4 * sizeof(void*) + sizeof(float));
}

RowTable RowTable::place(void* buffer, int64_t rows) {
    char** pointers = static_cast<char**>(buffer);
    RowTable table{};
    table.x = const_cast<const char**>(pointers);
    table.dout = const_cast<const char**>(pointers + rows);
    table.home = pointers + 2 * rows;
    table.dweight = reinterpret_cast<float**>(pointers + 3 * rows);
    table.weight = reinterpret_cast<float*>(pointers + 4 * rows);
    return table;
}

std::vector<Chunk> make_chunks(const Plan& plan, int64_t ring_rows) {
    std::vector<Chunk> chunks;
    const int32_t num_segments = static_cast<int32_t>(plan.counts.size());
    for (int64_t begin = 0; begin < plan.num_rows();) {
        Chunk chunk{begin, chunk_end(begin, plan.segment_begin.data(), num_segments, ring_rows), {}};
        for (int32_t segment = find_segment(begin, plan.segment_begin.data(), num_segments);
             segment < num_segments && plan.segment_begin[segment] < chunk.end; ++segment) {
            const int64_t valid_end = plan.segment_begin[segment] + plan.counts[segment];
            const int64_t piece_begin = std::max(begin, plan.segment_begin[segment]);
            const int64_t piece_end = std::min(chunk.end, valid_end);
            if (piece_end <= piece_begin) continue;
            chunk.pieces.push_back(Piece{segment, piece_begin - begin, piece_end - piece_begin,
                                         piece_begin == plan.segment_begin[segment], piece_end == valid_end});
        }
        begin = chunk.end;
        chunks.push_back(std::move(chunk));
    }
    return chunks;
}

void fill_row_table(const Plan& plan, const Chunk& chunk, const std::vector<RankView>& ranks, int64_t top_k,
                    int64_t row_bytes, bool backward, const RowTable& table) {
    for (int64_t row = 0; row < chunk.end - chunk.begin; ++row) {
        const int32_t peer = plan.row_peer[chunk.begin + row];
        if (peer < 0) {
            table.x[row] = table.dout[row] = nullptr;
            table.home[row] = nullptr;
            table.dweight[row] = nullptr;
            table.weight[row] = 0.0f;
            continue;
        }
        const RankView& home = ranks[peer];
        const int64_t slot = plan.row_slot[chunk.begin + row];
        const int64_t token = slot / top_k;
        table.x[row] = home.x + token * home.x_stride;
        table.dout[row] = backward ? home.dout + token * home.dout_stride : nullptr;
        table.home[row] = home.rows + slot * row_bytes;
        table.dweight[row] = backward ? home.dweights + slot : nullptr;
        table.weight[row] = backward ? home.weights[slot] : 0.0f;
    }
}

}  // namespace mok::cpu
