// Weight and bias gradients: FP32 over a whole segment in row order, rounded once.
#include <array>
#include <cstring>

#include "csrc/cpu/stages.h"
#include "csrc/cpu/stages_tiling.h"

namespace mok::cpu {

namespace {

char* gradient_row(const Gradient& gradient, int64_t expert, int64_t row, int64_t column) {
    const int64_t offset = expert * gradient.expert_stride + row * gradient.row_stride + column;
    return static_cast<char*>(gradient.data) + offset * dtype_bytes(gradient.dtype);
}

}  // namespace

int64_t Stages::accumulator_count(const ExpertSet& experts) {
    return 3 * experts.intermediate * experts.hidden + 2 * experts.intermediate + experts.hidden;
}

void Stages::weight_gradient(const Operand& a, const Operand& b, const GradientTile& tile, const Piece& piece,
                             const Gradient& gradient, bool accumulate, float* accumulator,
                             int64_t accumulator_columns, int64_t worker_index) const {
    const DType compute = shape_.compute;
    const Worker work = worker(worker_index, kernels_.packed_b_bytes(compute, tile.columns, kGradientRows),
                               tile.rows * tile.columns);
    float* carried = accumulator + tile.row * accumulator_columns + tile.column;
    if (!piece.first) {
        for (int64_t row = 0; row < tile.rows; ++row) {
            std::memcpy(work.tile + row * tile.columns, carried + row * accumulator_columns,
                        tile.columns * sizeof(float));
        }
    }
    for (int64_t begin = 0; begin < piece.rows; begin += kGradientRows) {
        const int64_t k = std::min(kGradientRows, piece.rows - begin);
        Operand a_part = a, b_part = b;
        a_part.data = static_cast<const char*>(a.data) + begin * a.stride_k * elem_;
        b_part.data = static_cast<const char*>(b.data) + begin * b.stride_k * elem_;
        kernels_.pack_b(compute, b_part, tile.columns, k, work.packed);
        kernels_.gemm(compute, a_part, work.packed, tile.rows, tile.columns, k, work.tile, tile.columns,
                      begin > 0 || !piece.first, work.gemm_scratch);
    }
    for (int64_t row = 0; row < tile.rows; ++row) {
        const float* sums = work.tile + row * tile.columns;
        if (piece.last) {
            kernels_.store_gradient(gradient.dtype, sums,
                                    gradient_row(gradient, piece.expert, tile.row + row, tile.column),
                                    accumulate, tile.columns);
        } else {
            std::memcpy(carried + row * accumulator_columns, sums, tile.columns * sizeof(float));
        }
    }
}

void Stages::bias_gradient(const Piece& piece, const char* rows, int64_t row_stride, const float* weights,
                           int64_t columns, const Gradient& gradient, bool accumulate, float* accumulator,
                           int64_t worker_index) const {
    float* partial = reinterpret_cast<float*>(scratch_ + worker_index * scratch_bytes_);
    float* sum = partial + round_up<int64_t>(columns, kScratchAlign / sizeof(float));
    if (piece.first) {
        std::memset(sum, 0, columns * sizeof(float));
    } else {
        std::memcpy(sum, accumulator, columns * sizeof(float));
    }
    // A piece starts at a multiple of 128 rows from its segment's start, so blocks counted from it are the
    // segment's.
    for (int64_t begin = 0; begin < piece.rows; begin += kBiasBlock) {
        std::memset(partial, 0, columns * sizeof(float));
        for (int64_t row = begin; row < std::min(piece.rows, begin + kBiasBlock); ++row) {
            kernels_.axpy(shape_.compute, weights ? weights[piece.row + row] : 1.0f,
                          rows + (piece.row + row) * row_stride, partial, columns);
        }
        kernels_.axpy(DType::kFloat32, 1.0f, partial, sum, columns);
    }
    if (piece.last) {
        kernels_.store_gradient(gradient.dtype, sum, gradient_row(gradient, piece.expert, 0, 0), accumulate,
                                columns);
    } else {
        std::memcpy(accumulator, sum, columns * sizeof(float));
    }
}

void Stages::weight_gradients(const ExpertSet& experts, const std::vector<Piece>& pieces,
                              const StageRows& rows, const ExpertGradients& gradients, bool accumulate,
                              float* accumulators) const {
    const int64_t hidden = experts.hidden, intermediate = experts.intermediate;
    const int64_t inner = intermediate * elem_;

    struct Product {
        const Gradient* gradient;
        const char* a;  // its columns are the rows of the gradient
        int64_t a_stride;
        int64_t out_rows;
        const char* b;
        int64_t b_stride;
        int64_t columns;
        float* accumulator;
    };
    const int64_t plane = hidden * intermediate;
    const std::array<Product, 3> products = {
        Product{&gradients.gate, rows.dgate, inner, intermediate, rows.x, rows.x_stride, hidden,
                accumulators},
        Product{&gradients.up, rows.dup, inner, intermediate, rows.x, rows.x_stride, hidden,
                accumulators + plane},
        Product{&gradients.down, rows.dout, rows.dout_stride, hidden, rows.hidden, inner, intermediate,
                accumulators + 2 * plane}};
    const int64_t block = column_block_limit(kGradientRows, 1);
    for (const Product& product : products) {
        if (product.gradient->data == nullptr) continue;
        const int64_t num_column_blocks = ceil_div(product.columns, block);
        const int64_t num_blocks = num_column_blocks * ceil_div(product.out_rows, kGradientOutRows);
        for_each_task(threads_, static_cast<int64_t>(pieces.size()) * num_blocks,
                      [&](int64_t task, int64_t index) {
                          const Piece& piece = pieces[task / num_blocks];
                          const int64_t column = task % num_column_blocks * block;
                          const int64_t row = task % num_blocks / num_column_blocks * kGradientOutRows;
                          const GradientTile tile{row, std::min(kGradientOutRows, product.out_rows - row),
                                                  column, std::min(block, product.columns - column)};
                          const Operand a{product.a + piece.row * product.a_stride + row * elem_,
                                          shape_.compute, 1, product.a_stride / elem_};
                          const Operand b{product.b + piece.row * product.b_stride + column * elem_,
                                          shape_.compute, 1, product.b_stride / elem_};
                          weight_gradient(a, b, tile, piece, *product.gradient, accumulate,
                                          product.accumulator, product.columns, index);
                      });
    }

    struct Reduction {
        const Gradient* gradient;
        const char* rows;
        int64_t stride;
        const float* weights;
        int64_t columns;
        float* accumulator;
    };
    float* bias_accumulators = accumulators + 3 * plane;
    const std::array<Reduction, 3> reductions = {
        Reduction{&gradients.b_gate, rows.dgate, inner, nullptr, intermediate, bias_accumulators},
        Reduction{&gradients.b_up, rows.dup, inner, nullptr, intermediate, bias_accumulators + intermediate},
        Reduction{&gradients.b_down, rows.dout, rows.dout_stride, rows.weight, hidden,
                  bias_accumulators + 2 * intermediate}};
    for (const Reduction& reduction : reductions) {
        if (reduction.gradient->data == nullptr) continue;
        for_each_task(threads_, static_cast<int64_t>(pieces.size()), [&](int64_t task, int64_t index) {
            bias_gradient(pieces[task], reduction.rows, reduction.stride, reduction.weights,
                          reduction.columns, *reduction.gradient, accumulate, reduction.accumulator, index);
        });
    }
}

void Stages::zero_idle(const ExpertSet& experts, const std::vector<int64_t>& counts,
                       const ExpertGradients& gradients) const {
    const auto zero = [&](const Gradient& gradient, int64_t expert, int64_t num_rows, int64_t columns) {
        if (gradient.data == nullptr) return;
        for (int64_t row = 0; row < num_rows; ++row) {
            std::memset(gradient_row(gradient, expert, row, 0), 0, columns * dtype_bytes(gradient.dtype));
        }
    };
    for_each_task(threads_, experts.num_experts, [&](int64_t expert, int64_t) {
        if (counts[expert] > 0) return;
        zero(gradients.gate, expert, experts.intermediate, experts.hidden);
        zero(gradients.up, expert, experts.intermediate, experts.hidden);
        zero(gradients.down, expert, experts.hidden, experts.intermediate);
        zero(gradients.b_gate, expert, 1, experts.intermediate);
        zero(gradients.b_up, expert, 1, experts.intermediate);
        zero(gradients.b_down, expert, 1, experts.hidden);
    });
}

}  // namespace mok::cpu
