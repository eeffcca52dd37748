// C (+)= A B^T from packed B: blocks of kBlockSteps steps along k counted from 0, with C as the accumulator's
// store between them. So one element is one chain over ascending k, whatever the tile, the block or the row
// it lies in.
#pragma once

#include "csrc/cpu/gemm_pack.h"

namespace mok::cpu::MOK_ISA {

constexpr int64_t kWordBytes = 4;
/// Row pitch of a copied K-contiguous A: a vector of slack at the end, and not a power of two (cache sets).
constexpr int64_t kRowWords = kBlockSteps + kLanes;
/// Pitch of an M-contiguous panel, with the slack its last vector store needs.
constexpr int64_t kPanelWords = kBlockSteps * kTileRows + kLanes;

/// Where the words of A lie: in rows (step pitch one word) or in panels (row pitch one word).
enum class ALayout { kRows, kPanels };

/// kRows x kTileColumns of C over `steps` (> 0) steps. `a` may have any alignment (BF16 rows read in place).
template <bool kPairs, ALayout kLayout, int kRows>
void tile(const char* a, int64_t a_row_bytes, const uint32_t* b, int64_t steps, float* c, int64_t ldc,
          bool accumulate) {
    Floats acc[kRows][kTileVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
        for (int v = 0; v < kTileVectors; ++v) {
            acc[i][v] = accumulate ? load(c + i * ldc + v * kLanes) : Floats{};
        }
    }
    int64_t step = 0;
    do {
        Words columns[kTileVectors];
#pragma GCC unroll 16
        for (int v = 0; v < kTileVectors; ++v)
            columns[v] = load_as<Words>(b + step * kTileColumns + v * kLanes);
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
            const char* at = kLayout == ALayout::kRows ? a + i * a_row_bytes + step * kWordBytes
                                                       : a + (step * kTileRows + i) * kWordBytes;
            const Words factor = broadcast(load_as<uint32_t>(at));
#pragma GCC unroll 16
            for (int v = 0; v < kTileVectors; ++v) {
                acc[i][v] = multiply_add<kPairs>(factor, columns[v], acc[i][v]);
            }
        }
    } while (++step < steps);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
        for (int v = 0; v < kTileVectors; ++v) store(c + i * ldc + v * kLanes, acc[i][v]);
    }
}

using TileFunction = void (*)(const char*, int64_t, const uint32_t*, int64_t, float*, int64_t, bool);

/// The tile of 1 to kTileRows rows: a partial one reads and writes its own rows only.
template <bool kPairs, ALayout kLayout, size_t... kIndex>
TileFunction pick_tile(int64_t rows, std::index_sequence<kIndex...>) {
    static constexpr TileFunction tiles[] = {tile<kPairs, kLayout, static_cast<int>(kIndex) + 1>...};
    return tiles[rows - 1];
}

template <bool kPairs>
TileFunction pick_tile(ALayout layout, int64_t rows) {
    using Sequence = std::make_index_sequence<kTileRows>;
    return layout == ALayout::kRows ? pick_tile<kPairs, ALayout::kRows>(rows, Sequence{})
                                    : pick_tile<kPairs, ALayout::kPanels>(rows, Sequence{});
}

/// One block of A, ready for the tiles.
struct ABlock {
    ALayout layout;
    const char* data;
    int64_t row_bytes;    // kRows
    int64_t panel_bytes;  // from one tile of rows to the next
    int64_t steps;        // a last odd k of rows read in place is not among them: `odd` has its words
    uint32_t odd[kBlockRows + kTileRows];
    bool has_odd;
};

template <typename T, bool kRound, bool kPairs>
void prepare_a(const Operand& a, int64_t i0, int64_t rows, int64_t m, int64_t k0, int64_t k_end,
               uint32_t* scratch, ABlock& block) {
    const T* data = static_cast<const T*>(a.data) + i0 * a.stride_i;
    block.steps = num_steps(kPairs, k_end - k0);
    block.has_odd = false;
    if (a.stride_k != 1) {
        block.layout = ALayout::kPanels;
        block.data = reinterpret_cast<const char*>(scratch);
        block.panel_bytes = kPanelWords * kWordBytes;
        pack_a_panels<T, kRound, kPairs>(data, a.stride_k, rows, m - i0, k0, k_end, scratch, kPanelWords);
        return;
    }
    block.layout = ALayout::kRows;
    if constexpr (kPairs && sizeof(T) == 2) {
        block.data = reinterpret_cast<const char*>(data + k0);
        block.row_bytes = a.stride_i * 2;
        if ((k_end - k0) % 2) {
            block.steps -= 1;
            block.has_odd = true;
            for (int64_t i = 0; i < rows; ++i) block.odd[i] = data[i * a.stride_i + k_end - 1].bits;
        }
    } else {
        block.data = reinterpret_cast<const char*>(scratch);
        block.row_bytes = kRowWords * kWordBytes;
        pack_a_rows<T, kRound, kPairs>(data, a.stride_i, rows, k0, k_end, scratch, kRowWords);
    }
    block.panel_bytes = kTileRows * block.row_bytes;
}

template <bool kPairs>
void multiply_tile(const ABlock& block, int64_t row, int64_t rows, const uint32_t* b, float* c, int64_t ldc,
                   bool accumulate) {
    const char* a = block.data + row / kTileRows * block.panel_bytes;
    if (!kPairs || block.steps > 0) {
        pick_tile<kPairs>(block.layout, rows)(a, block.row_bytes, b, block.steps, c, ldc, accumulate);
    }
    if (kPairs && block.has_odd) {
        const char* odd = reinterpret_cast<const char*>(block.odd + row);
        const uint32_t* b_odd = b + block.steps * kTileColumns;
        pick_tile<kPairs>(ALayout::kPanels, rows)(odd, 0, b_odd, 1, c, ldc, accumulate || block.steps > 0);
    }
}

/// A tile at the right edge goes through a full-width copy, so that no column past n is touched.
template <bool kPairs>
void multiply_edge_tile(const ABlock& block, int64_t row, int64_t rows, const uint32_t* b, float* c,
                        int64_t ldc, int64_t columns, bool accumulate) {
    alignas(64) float full[kTileRows * kTileColumns] = {};
    const size_t bytes = static_cast<size_t>(columns) * sizeof(float);
    for (int64_t i = 0; accumulate && i < rows; ++i)
        __builtin_memcpy(full + i * kTileColumns, c + i * ldc, bytes);
    multiply_tile<kPairs>(block, row, rows, b, full, kTileColumns, accumulate);
    for (int64_t i = 0; i < rows; ++i) __builtin_memcpy(c + i * ldc, full + i * kTileColumns, bytes);
}

template <typename T, bool kRound, bool kPairs>
void multiply(const Operand& a, const uint32_t* b, int64_t m, int64_t n, int64_t k, float* c, int64_t ldc,
              bool accumulate, uint32_t* scratch) {
    if (k == 0) {
        for (int64_t i = 0; !accumulate && i < m; ++i) {
            for (int64_t j = 0; j < n; ++j) c[i * ldc + j] = 0.0f;
        }
        return;
    }
    constexpr int64_t kBlockK = kBlockSteps * (kPairs ? 2 : 1);
    const int64_t panel_words = num_steps(kPairs, k) * kTileColumns;
    ABlock block;
    for (int64_t k0 = 0; k0 < k; k0 += kBlockK) {
        const int64_t k_end = k - k0 < kBlockK ? k : k0 + kBlockK;
        const uint32_t* b_block = b + k0 / kBlockK * kBlockSteps * kTileColumns;
        const bool onto_c = accumulate || k0 > 0;
        for (int64_t i0 = 0; i0 < m; i0 += kBlockRows) {
            const int64_t rows = m - i0 < kBlockRows ? m - i0 : kBlockRows;
            prepare_a<T, kRound, kPairs>(a, i0, rows, m, k0, k_end, scratch, block);
            for (int64_t j = 0; j < n; j += kTileColumns) {
                const uint32_t* panel = b_block + j / kTileColumns * panel_words;
                for (int64_t i = 0; i < rows; i += kTileRows) {
                    const int64_t tile_rows = rows - i < kTileRows ? rows - i : kTileRows;
                    float* c_tile = c + (i0 + i) * ldc + j;
                    if (j + kTileColumns <= n) {
                        multiply_tile<kPairs>(block, i, tile_rows, panel, c_tile, ldc, onto_c);
                    } else {
                        multiply_edge_tile<kPairs>(block, i, tile_rows, panel, c_tile, ldc, n - j, onto_c);
                    }
                }
            }
        }
    }
}

// The table's entries.

inline bool uses_pairs(DType compute) {
    return kHasPairs && compute == DType::kBFloat16;
}

inline int64_t packed_b_bytes(DType compute, int64_t n, int64_t k) {
    return round_up<int64_t>(n, kTileColumns) * num_steps(uses_pairs(compute), k) * kWordBytes;
}

/// BF16 data in an FP32 product is widened, which is exact; FP32 data in a BF16 product is rounded.
inline void pack_b(DType compute, const Operand& b, int64_t n, int64_t k, void* packed) {
    uint32_t* out = static_cast<uint32_t*>(packed);
    if (compute == DType::kBFloat16) {
        if (b.dtype == DType::kBFloat16) return pack_b_panels<bf16, false, kHasPairs>(b, n, k, out);
        return pack_b_panels<float, true, kHasPairs>(b, n, k, out);
    }
    if (b.dtype == DType::kBFloat16) return pack_b_panels<bf16, false, false>(b, n, k, out);
    return pack_b_panels<float, false, false>(b, n, k, out);
}

inline int64_t gemm_scratch_bytes(DType, int64_t) {
    const int64_t rows = kBlockRows * kRowWords;
    const int64_t panels = ceil_div<int64_t>(kBlockRows, kTileRows) * kPanelWords;
    return (rows > panels ? rows : panels) * kWordBytes;
}

inline void gemm(DType compute, const Operand& a, const void* packed_b, int64_t m, int64_t n, int64_t k,
                 float* c, int64_t ldc, bool accumulate, void* scratch) {
    const uint32_t* b = static_cast<const uint32_t*>(packed_b);
    uint32_t* words = static_cast<uint32_t*>(scratch);
    if (compute == DType::kBFloat16) {
        if (a.dtype == DType::kBFloat16) {
            return multiply<bf16, false, kHasPairs>(a, b, m, n, k, c, ldc, accumulate, words);
        }
        return multiply<float, true, kHasPairs>(a, b, m, n, k, c, ldc, accumulate, words);
    }
    if (a.dtype == DType::kBFloat16)
        return multiply<bf16, false, false>(a, b, m, n, k, c, ldc, accumulate, words);
    return multiply<float, false, false>(a, b, m, n, k, c, ldc, accumulate, words);
}

}  // namespace mok::cpu::MOK_ISA
