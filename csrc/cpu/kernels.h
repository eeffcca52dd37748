// The CPU's instructions behind one table: packed GEMM and the elementwise rows of the numerics contract.
//
// Every entry exists once per instruction set (portable, AVX2 + FMA, AVX-512 BF16); `kernels()` picks the
// best one the processor has, `MOK_CPU_ISA=portable|avx2|avx512` overrides. All results are FP32
// accumulations in a fixed order: for one output element, k ascends from 0 (in pairs on AVX-512 BF16),
// whatever M, N, blocking or the number of threads, so that a row's bits depend on that row and the weights
// alone.
#pragma once

#include <cstdint>

#include "csrc/layout/types.h"

namespace mok::cpu {

enum class Activation : int32_t { kSwiglu = 0, kSwigluLimit = 1, kGptOss = 2 };

struct ActivationSpec {
    Activation kind = Activation::kSwiglu;
    float limit = 0.0f;  // kSwigluLimit and kGptOss
};

/// One operand of a product. Element (i, k) lies at data[i * stride_i + k * stride_k]; one of the two strides
/// is 1. i is the output index (a row of A, a column of C for B), k the contraction index. FP32 data in a
/// BF16 product is rounded to BF16 while it is packed (FP32 master weights).
struct Operand {
    const void* data;
    DType dtype;
    int64_t stride_i;
    int64_t stride_k;
};

struct KernelTable {
    const char* name;  // "portable", "avx2", "avx512"

    /// Bytes `pack_b` writes for an n x k operand; buffers are 64-byte aligned.
    int64_t (*packed_b_bytes)(DType compute, int64_t n, int64_t k);
    void (*pack_b)(DType compute, const Operand& b, int64_t n, int64_t k, void* packed);
    /// Scratch `gemm` needs for its own packing of A (0 where it needs none).
    int64_t (*gemm_scratch_bytes)(DType compute, int64_t k);
    /// c[i * ldc + j] (+)= sum_k a(i, k) b(j, k) for i < m, j < n; `accumulate` continues from c instead of
    /// 0. `compute` is the type of the factors (BF16 or FP32), c is FP32.
    void (*gemm)(DType compute, const Operand& a, const void* packed_b, int64_t m, int64_t n, int64_t k,
                 float* c, int64_t ldc, bool accumulate, void* scratch);

    // Rows below have n elements of the compute type T (`const void*`); biases are FP32 or null.

    /// g = rn(g_acc + b_g), u = rn(u_acc + b_u), h = rn(act(g, u)) from the rounded g and u. Any output may
    /// be null.
    void (*activation_forward)(DType compute, const ActivationSpec& spec, const float* g_acc,
                               const float* u_acc, const float* b_g, const float* b_u, void* g, void* u,
                               void* h, int64_t n);
    /// h = rn(act(g, u)) from stored g and u.
    void (*activation)(DType compute, const ActivationSpec& spec, const void* g, const void* u, void* h,
                       int64_t n);
    /// One row, columns [0, n) of a span that starts at a multiple of 64 of I: q = w * a, dg = rn(q dp/dg),
    /// du = rn(q dp/du), hw = rn(w * p); dw_partials[b] = sum over the 64 columns of block b of p_j a_j (p
    /// unrounded).
    void (*activation_backward)(DType compute, const ActivationSpec& spec, const void* g, const void* u,
                                const float* a, float w, void* dg, void* du, void* hw, float* dw_partials,
                                int64_t n);
    /// out = rn(acc + bias).
    void (*store)(DType compute, const float* acc, const float* bias, void* out, int64_t n);
    /// out = rn(w_0 y_0 + w_1 y_1 + ...): an FMA chain from +0 in that order over num_rows rows; weights
    /// null: all 1.
    void (*weighted_sum)(DType compute, const void* const* rows, const float* weights, int64_t num_rows,
                         void* out, int64_t n);
    /// sum_j row_j b_j in a fixed order.
    float (*dot)(DType compute, const void* row, const float* b, int64_t n);
    /// acc_j = fma(w, row_j, acc_j).
    void (*axpy)(DType compute, float w, const void* row, float* acc, int64_t n);
    /// out = acc (FP32), rn(acc) (BF16); `accumulate`: out + acc in FP32, then rounded to out's type.
    void (*store_gradient)(DType out_dtype, const float* acc, void* out, bool accumulate, int64_t n);
};

/// The table for this process: the best instruction set present unless MOK_CPU_ISA says otherwise.
const KernelTable& kernels();
/// By name; throws std::invalid_argument naming the instruction set and what the processor has.
const KernelTable& kernels(const char* name);

}  // namespace mok::cpu
