// The stages of a layer over the rows that lie in the ring: each is one pass of independent tasks.
//
// A task is (piece, column block, row group); every output element is computed by one task over its whole
// contraction, so neither the tiling nor the number of threads can change a bit.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/cpu/executor.h"
#include "csrc/cpu/rows.h"

namespace mok::cpu {

/// Width of the blocks of I whose router-gradient partial sums are added in order (numerics contract).
constexpr int64_t kDweightBlock = 64;
/// Rows per partial sum of a bias gradient, counted from the segment's start (numerics contract).
constexpr int64_t kBiasBlock = 128;

/// The experts of one stage: this rank's routed ones, or the shared one.
struct ExpertSet {
    const ExpertWeights* weights;
    int64_t num_experts;
    int64_t hidden;
    int64_t intermediate;
    /// [num_experts, 2 I + H]: gate, up, down, FP32, rounded to the compute type.
    const float* biases = nullptr;

    const float* b_gate(int64_t expert) const { return weights->b_gate.data ? bias_row(expert) : nullptr; }
    const float* b_up(int64_t expert) const {
        return weights->b_up.data ? bias_row(expert) + intermediate : nullptr;
    }
    const float* b_down(int64_t expert) const {
        return weights->b_down.data ? bias_row(expert) + 2 * intermediate : nullptr;
    }
    int64_t bias_count() const { return num_experts * (2 * intermediate + hidden); }

  private:
    const float* bias_row(int64_t expert) const { return biases + expert * (2 * intermediate + hidden); }
};

/// Buffers of a stage; row r of the ring lies at base + r * stride. Strides in bytes.
struct StageRows {
    const char* x = nullptr;
    int64_t x_stride = 0;
    const char* dout = nullptr;
    int64_t dout_stride = 0;
    char* gate = nullptr;  // [rows, I], as are the next four
    char* up = nullptr;
    char* hidden = nullptr;  // h forward, h' = rn(w p) backward
    char* dgate = nullptr;
    char* dup = nullptr;
    char* const* home = nullptr;        // [rows] where y or dx of a row goes
    float* const* dweight = nullptr;    // [rows] where its router-weight gradient goes
    const float* weight = nullptr;      // [rows]
    float* dweight_partials = nullptr;  // [rows, ceil(I / 64)]
};

class Stages {
  public:
    Stages(const KernelTable& kernels, const LayerShape& shape, const ThreadPool& threads);

    /// Scratch per worker that the stages below need for these experts, in bytes.
    int64_t worker_bytes(const ExpertSet& experts, bool backward) const;
    void set_worker_scratch(char* scratch, int64_t bytes_per_worker);

    /// Copies rows into the ring (dispatch); a row without source becomes zeros.
    void gather(const char* const* sources, int64_t num_rows, int64_t row_bytes, char* target) const;
    void zero_rows(char* target, int64_t bytes) const;

    /// gate, up, hidden (any may be null) from x.
    void gate_up(const ExpertSet& experts, const std::vector<Piece>& pieces, const StageRows& rows) const;
    /// y from hidden, each row written straight to its home.
    void down(const ExpertSet& experts, const std::vector<Piece>& pieces, const StageRows& rows) const;
    /// dgate, dup, hidden = rn(w p) and the partial sums of the router gradient from dout, gate, up.
    void dhidden(const ExpertSet& experts, const std::vector<Piece>& pieces, const StageRows& rows) const;
    /// The router-weight gradients of all rows, sent home.
    void router_gradient(const ExpertSet& experts, const std::vector<Piece>& pieces,
                         const StageRows& rows) const;
    /// dx from dgate and dup in one accumulator, each row written straight to its home.
    void dx(const ExpertSet& experts, const std::vector<Piece>& pieces, const StageRows& rows) const;
    /// All wanted weight and bias gradients; a cut segment goes on in `accumulators` (accumulator_count
    /// floats).
    void weight_gradients(const ExpertSet& experts, const std::vector<Piece>& pieces, const StageRows& rows,
                          const ExpertGradients& gradients, bool accumulate, float* accumulators) const;
    static int64_t accumulator_count(const ExpertSet& experts);
    /// Idle experts: zeros, unless gradients accumulate.
    void zero_idle(const ExpertSet& experts, const std::vector<int64_t>& counts,
                   const ExpertGradients& gradients) const;

    /// out_t = rn(sum of the token's rows that are routes, weighted), optionally led by a shared row.
    void combine(const RankView& own, const char* shared_rows, const float* shared_weight,
                 const float* weights, char* out) const;

    void convert_biases(const ExpertSet& experts, float* out) const;

  private:
    struct Tiling {
        int64_t column_block;
        int64_t num_column_blocks;
        int64_t row_groups;
    };
    struct GradientTile {
        int64_t row, rows, column, columns;
    };
    struct Worker {
        char* packed;
        float* tile;
        void* gemm_scratch;
    };

    int64_t column_block_limit(int64_t k, int64_t matrices) const;
    Tiling tile(int64_t columns, int64_t k, int64_t matrices, const std::vector<Piece>& pieces) const;
    Worker worker(int64_t index, int64_t packed_bytes, int64_t tile_floats) const;
    int64_t stage_bytes(int64_t k, int64_t matrices, int64_t tile_rows) const;
    /// Runs body(piece, first column, columns, first row, rows, worker) over the tiles of a stage.
    template <typename Body>
    void for_each_tile(const std::vector<Piece>& pieces, int64_t columns, int64_t k, int64_t matrices,
                       const Body& body) const;
    void weight_gradient(const Operand& a, const Operand& b, const GradientTile& tile, const Piece& piece,
                         const Gradient& gradient, bool accumulate, float* accumulator,
                         int64_t accumulator_columns, int64_t worker_index) const;
    void bias_gradient(const Piece& piece, const char* rows, int64_t row_stride, const float* weights,
                       int64_t columns, const Gradient& gradient, bool accumulate, float* accumulator,
                       int64_t worker_index) const;

    const KernelTable& kernels_;
    LayerShape shape_;
    int64_t elem_;
    ThreadPool threads_;
    char* scratch_ = nullptr;
    int64_t scratch_bytes_ = 0;
};

}  // namespace mok::cpu
