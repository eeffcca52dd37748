// gate, up, hidden and y of the rows in the ring.
#include "csrc/cpu/stages.h"
#include "csrc/cpu/stages_tiling.h"

namespace mok::cpu {

namespace {

char* element(char* base, int64_t row, int64_t row_elements, int64_t column, int64_t elem) {
    return base == nullptr ? nullptr : base + (row * row_elements + column) * elem;
}

const float* at(const float* bias, int64_t column) {
    return bias == nullptr ? nullptr : bias + column;
}

}  // namespace

void Stages::gate_up(const ExpertSet& experts, const std::vector<Piece>& pieces,
                     const StageRows& rows) const {
    const int64_t hidden = experts.hidden, intermediate = experts.intermediate;
    const DType compute = shape_.compute;
    for_each_tile(pieces, intermediate, hidden, 2,
                  [&](const Piece& piece, int64_t first, int64_t columns, int64_t row, int64_t num_rows,
                      int64_t index) {
                      const int64_t packed_bytes = kernels_.packed_b_bytes(compute, columns, hidden);
                      const Worker work = worker(index, 2 * packed_bytes, 2 * kRowBlock * columns);
                      char* packed_up = work.packed + packed_bytes;
                      float* up_tile = work.tile + kRowBlock * columns;
                      kernels_.pack_b(compute, rows_as_columns(experts.weights->gate, piece.expert, first),
                                      columns, hidden, work.packed);
                      kernels_.pack_b(compute, rows_as_columns(experts.weights->up, piece.expert, first),
                                      columns, hidden, packed_up);
                      for (int64_t begin = row; begin < row + num_rows; begin += kRowBlock) {
                          const int64_t count = std::min(kRowBlock, row + num_rows - begin);
                          const Operand x{rows.x + begin * rows.x_stride, compute, rows.x_stride / elem_, 1};
                          kernels_.gemm(compute, x, work.packed, count, columns, hidden, work.tile, columns,
                                        false, work.gemm_scratch);
                          kernels_.gemm(compute, x, packed_up, count, columns, hidden, up_tile, columns,
                                        false, work.gemm_scratch);
                          for (int64_t i = 0; i < count; ++i) {
                              kernels_.activation_forward(
                                  compute, shape_.activation, work.tile + i * columns, up_tile + i * columns,
                                  at(experts.b_gate(piece.expert), first),
                                  at(experts.b_up(piece.expert), first),
                                  element(rows.gate, begin + i, intermediate, first, elem_),
                                  element(rows.up, begin + i, intermediate, first, elem_),
                                  element(rows.hidden, begin + i, intermediate, first, elem_), columns);
                          }
                      }
                  });
}

void Stages::down(const ExpertSet& experts, const std::vector<Piece>& pieces, const StageRows& rows) const {
    const int64_t hidden = experts.hidden, intermediate = experts.intermediate;
    const DType compute = shape_.compute;
    for_each_tile(
        pieces, hidden, intermediate, 1,
        [&](const Piece& piece, int64_t first, int64_t columns, int64_t row, int64_t num_rows,
            int64_t index) {
            const Worker work =
                worker(index, kernels_.packed_b_bytes(compute, columns, intermediate), kRowBlock * columns);
            kernels_.pack_b(compute, rows_as_columns(experts.weights->down, piece.expert, first), columns,
                            intermediate, work.packed);
            for (int64_t begin = row; begin < row + num_rows; begin += kRowBlock) {
                const int64_t count = std::min(kRowBlock, row + num_rows - begin);
                const Operand h{rows.hidden + begin * intermediate * elem_, compute, intermediate, 1};
                kernels_.gemm(compute, h, work.packed, count, columns, intermediate, work.tile, columns,
                              false, work.gemm_scratch);
                for (int64_t i = 0; i < count; ++i) {
                    kernels_.store(compute, work.tile + i * columns, at(experts.b_down(piece.expert), first),
                                   rows.home[begin + i] + first * elem_, columns);
                }
            }
        });
}

}  // namespace mok::cpu
