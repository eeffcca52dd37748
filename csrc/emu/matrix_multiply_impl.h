// Included by csrc/emu/matrix_<instruction set>.cpp only, after its target pragma: MOK_ISA is its namespace,
// MOK_LANES the floats in a vector, `fma` a lane-wise fused multiply-add.
#pragma once

#include "csrc/emu/matrix_multiply.h"

namespace mok::emu::MOK_ISA {

typedef uint16_t Halves __attribute__((vector_size(16)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint32_t Bits __attribute__((vector_size(4 * MOK_LANES)));

// 4 rows x 2 vectors: 8 chains keep two FMA units with a latency of 4 busy.
constexpr uint32_t kBlockRows = 4;

/// Both operands as FP32, as the products read them; A as bits, since only those are broadcast unchanged.
struct alignas(64) Factors {
    uint32_t a[kWarpRows][kMaxDepth];
    float b[kMaxDepth][kMaxColumns];
};

inline void store_widened(Halves halves, void* out) {
    const Words words = __builtin_convertvector(halves, Words) << 16;
    __builtin_memcpy(out, &words, sizeof(words));
}

inline void widen_8(const uint8_t* bytes, void* out) {
    Halves halves;
    __builtin_memcpy(&halves, bytes, sizeof(halves));
    store_widened(halves, out);
}

/// 8 rows of 8 BF16, `pitch` bytes apart, to 8 columns of 32-bit words.
template <typename Word>
inline void transpose_8x8(const uint8_t* rows, uint32_t pitch, Word* out, uint32_t out_pitch) {
    static_assert(sizeof(Word) == 4);
    Halves r[8], s[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) __builtin_memcpy(&r[i], rows + i * pitch, sizeof(r[i]));
        // Three rounds of interleaving rows i and i + 4 move the row's number into the lane's.
#pragma GCC unroll 3
    for (int round = 0; round < 3; ++round) {
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            s[2 * i] = __builtin_shufflevector(r[i], r[i + 4], 0, 8, 1, 9, 2, 10, 3, 11);
            s[2 * i + 1] = __builtin_shufflevector(r[i], r[i + 4], 4, 12, 5, 13, 6, 14, 7, 15);
        }
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) r[i] = s[i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) store_widened(r[i], out + i * out_pitch);
}

inline float float8_value(MatrixElement element, uint8_t bits) {
    return element == MatrixElement::kE4M3 ? e4m3_value(bits) : e5m2_value(bits);
}

inline void widen_a(const MultiplyShape& shape, RawOperand& raw, Factors& factors) {
    if (shape.a != MatrixElement::kBFloat16) {
        for (uint32_t i = 0; i < kWarpRows; ++i) {
            for (uint32_t k = 0; k < kMaxDepth; ++k)
                factors.a[i][k] = std::bit_cast<uint32_t>(float8_value(shape.a, raw.row(i)[k]));
        }
    } else if (shape.mn_major_a) {
        for (uint32_t i = 0; i < kWarpRows; i += 8) {
            for (uint32_t k = 0; k < 16; k += 8)
                transpose_8x8(raw.line(k) + 2 * i, RawOperand::kLineBytes, &factors.a[i][k], kMaxDepth);
        }
    } else {
        for (uint32_t i = 0; i < kWarpRows; ++i) {
            for (uint32_t k = 0; k < 16; k += 8) widen_8(raw.row(i) + 2 * k, &factors.a[i][k]);
        }
    }
}

inline void widen_b(const MultiplyShape& shape, RawOperand& raw, Factors& factors) {
    if (shape.b != MatrixElement::kBFloat16) {
        for (uint32_t n = 0; n < shape.columns; ++n) {
            for (uint32_t k = 0; k < kMaxDepth; ++k) factors.b[k][n] = float8_value(shape.b, raw.row(n)[k]);
        }
        return;
    }
    for (uint32_t n = 0; n < shape.columns; n += 8) {
        if (shape.mn_major_b) {
            for (uint32_t k = 0; k < 16; ++k) widen_8(raw.line(k) + 2 * n, &factors.b[k][n]);
        } else {
            transpose_8x8(raw.row(n), kDepthBytes, &factors.b[0][n], kMaxColumns);
            transpose_8x8(raw.row(n) + 16, kDepthBytes, &factors.b[8][n], kMaxColumns);
        }
    }
}

/// kBlockRows rows of d (`pitch` floats apart), kVectors vectors of columns, from row `row` of A and column
/// `column` of B on.
template <int kVectors>
inline void multiply_block(const Factors& factors, uint32_t depth, uint32_t row, uint32_t column, float* d,
                           uint32_t pitch) {
    Floats sums[kBlockRows][kVectors];
#pragma GCC unroll 4
    for (uint32_t i = 0; i < kBlockRows; ++i) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
            __builtin_memcpy(&sums[i][v], d + i * pitch + v * MOK_LANES, sizeof(Floats));
    }
    for (uint32_t k = 0; k < depth; ++k) {
        Floats columns[kVectors];
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
            __builtin_memcpy(&columns[v], &factors.b[k][column + v * MOK_LANES], sizeof(Floats));
#pragma GCC unroll 4
        for (uint32_t i = 0; i < kBlockRows; ++i) {
            const Floats factor = (Floats)(Bits{} + factors.a[row + i][k]);
#pragma GCC unroll 2
            for (int v = 0; v < kVectors; ++v) sums[i][v] = fma(factor, columns[v], sums[i][v]);
        }
    }
#pragma GCC unroll 4
    for (uint32_t i = 0; i < kBlockRows; ++i) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
            __builtin_memcpy(d + i * pitch + v * MOK_LANES, &sums[i][v], sizeof(Floats));
    }
}

/// The last `width` columns, fewer than a vector, through a full-width copy.
inline void multiply_edge(const Factors& factors, uint32_t depth, uint32_t row, uint32_t column, float* d,
                          uint32_t pitch, uint32_t width) {
    float full[kBlockRows * MOK_LANES] = {};
    for (uint32_t i = 0; i < kBlockRows; ++i)
        __builtin_memcpy(full + i * MOK_LANES, d + i * pitch, width * sizeof(float));
    multiply_block<1>(factors, depth, row, column, full, MOK_LANES);
    for (uint32_t i = 0; i < kBlockRows; ++i)
        __builtin_memcpy(d + i * pitch, full + i * MOK_LANES, width * sizeof(float));
}

inline void multiply(const MultiplyShape& shape, RawOperand& a, RawOperand& b, bool accumulate, float* d) {
    static Factors factors;  // columns past N keep old numbers, whose products nobody reads
    widen_a(shape, a, factors);
    widen_b(shape, b, factors);
    const uint32_t pitch = shape.columns, depth = shape.depth();
    if (!accumulate) __builtin_memset(d, 0, kWarpRows * pitch * sizeof(float));
    constexpr uint32_t kWide = 2 * MOK_LANES;
    for (uint32_t column = 0, width; column < shape.columns; column += width) {
        const uint32_t left = shape.columns - column;
        width = left >= kWide ? kWide : left >= MOK_LANES ? MOK_LANES : left;
        for (uint32_t row = 0; row < kWarpRows; row += kBlockRows) {
            float* corner = d + row * pitch + column;
            if (width == kWide) {
                multiply_block<2>(factors, depth, row, column, corner, pitch);
            } else if (width == MOK_LANES) {
                multiply_block<1>(factors, depth, row, column, corner, pitch);
            } else {
                multiply_edge(factors, depth, row, column, corner, pitch, width);
            }
        }
    }
}

}  // namespace mok::emu::MOK_ISA
