// dgate, dup, h', the router gradient and dx of the rows in the ring.
#include <cstring>

#include "csrc/cpu/stages.h"
#include "csrc/cpu/stages_tiling.h"

namespace mok::cpu {

void Stages::dhidden(const ExpertSet& experts, const std::vector<Piece>& pieces,
                     const StageRows& rows) const {
    const int64_t hidden = experts.hidden, intermediate = experts.intermediate;
    const int64_t num_blocks = ceil_div(intermediate, kDweightBlock);
    const DType compute = shape_.compute;
    for_each_tile(
        pieces, intermediate, hidden, 1,
        [&](const Piece& piece, int64_t first, int64_t columns, int64_t row, int64_t num_rows,
            int64_t index) {
            const Worker work =
                worker(index, kernels_.packed_b_bytes(compute, columns, hidden), kRowBlock * columns);
            kernels_.pack_b(compute, columns_as_columns(experts.weights->down, piece.expert, first), columns,
                            hidden, work.packed);
            for (int64_t begin = row; begin < row + num_rows; begin += kRowBlock) {
                const int64_t count = std::min(kRowBlock, row + num_rows - begin);
                const Operand dout{rows.dout + begin * rows.dout_stride, compute, rows.dout_stride / elem_,
                                   1};
                kernels_.gemm(compute, dout, work.packed, count, columns, hidden, work.tile, columns, false,
                              work.gemm_scratch);
                for (int64_t i = 0; i < count; ++i) {
                    const int64_t offset = ((begin + i) * intermediate + first) * elem_;
                    kernels_.activation_backward(
                        compute, shape_.activation, rows.gate + offset, rows.up + offset,
                        work.tile + i * columns, rows.weight[begin + i], rows.dgate + offset,
                        rows.dup + offset, rows.hidden + offset,
                        rows.dweight_partials + (begin + i) * num_blocks + first / kDweightBlock, columns);
                }
            }
        });
}

void Stages::router_gradient(const ExpertSet& experts, const std::vector<Piece>& pieces,
                             const StageRows& rows) const {
    const int64_t num_blocks = ceil_div(experts.intermediate, kDweightBlock);
    for_each_task(threads_, static_cast<int64_t>(pieces.size()), [&](int64_t task, int64_t) {
        const Piece& piece = pieces[task];
        const float* b_down = experts.b_down(piece.expert);
        for (int64_t row = piece.row; row < piece.row + piece.rows; ++row) {
            const float* partials = rows.dweight_partials + row * num_blocks;
            float sum = 0.0f;
            for (int64_t block = 0; block < num_blocks; ++block) sum += partials[block];
            if (b_down != nullptr) {
                sum +=
                    kernels_.dot(shape_.compute, rows.dout + row * rows.dout_stride, b_down, experts.hidden);
            }
            *rows.dweight[row] = sum;
        }
    });
}

void Stages::dx(const ExpertSet& experts, const std::vector<Piece>& pieces, const StageRows& rows) const {
    const int64_t hidden = experts.hidden, intermediate = experts.intermediate;
    const DType compute = shape_.compute;
    for_each_tile(
        pieces, hidden, intermediate, 2,
        [&](const Piece& piece, int64_t first, int64_t columns, int64_t row, int64_t num_rows,
            int64_t index) {
            const int64_t packed_bytes = kernels_.packed_b_bytes(compute, columns, intermediate);
            const Worker work = worker(index, 2 * packed_bytes, kRowBlock * columns);
            char* packed_up = work.packed + packed_bytes;
            kernels_.pack_b(compute, columns_as_columns(experts.weights->gate, piece.expert, first), columns,
                            intermediate, work.packed);
            kernels_.pack_b(compute, columns_as_columns(experts.weights->up, piece.expert, first), columns,
                            intermediate, packed_up);
            for (int64_t begin = row; begin < row + num_rows; begin += kRowBlock) {
                const int64_t count = std::min(kRowBlock, row + num_rows - begin);
                const int64_t offset = begin * intermediate * elem_;
                kernels_.gemm(compute, Operand{rows.dgate + offset, compute, intermediate, 1}, work.packed,
                              count, columns, intermediate, work.tile, columns, false, work.gemm_scratch);
                kernels_.gemm(compute, Operand{rows.dup + offset, compute, intermediate, 1}, packed_up, count,
                              columns, intermediate, work.tile, columns, true, work.gemm_scratch);
                for (int64_t i = 0; i < count; ++i) {
                    kernels_.store(compute, work.tile + i * columns, nullptr,
                                   rows.home[begin + i] + first * elem_, columns);
                }
            }
        });
}

}  // namespace mok::cpu
