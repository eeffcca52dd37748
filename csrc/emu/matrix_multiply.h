// wgmma's arithmetic for one warp: its 16 rows of A times B, in FP32 chains.
//
// One element of the accumulator is one FMA chain over ascending k, as in the CPU executor's FP32 product, so
// that an emulated kernel equals the executor bit for bit. (Hardware sums each instruction's k in an order of
// its own, and FP8 with fewer bits.) Every instruction set gives the same bits.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/emu/matrix_element.h"

namespace mok::emu {

constexpr uint32_t kWarpRows = 16;
constexpr uint32_t kMaxColumns = 256;
constexpr uint32_t kMaxDepth = 32;    // of one instruction, in elements: FP8
constexpr uint32_t kDepthBytes = 32;  // of one instruction

/// One operand as gathered from shared memory, 16 bytes at a time. K-major: [row][32 bytes of k]. MN-major
/// (BF16 only): [k][bytes of M or N], lines of 2 * kMaxColumns bytes.
struct alignas(64) RawOperand {
    static constexpr uint32_t kLineBytes = 2 * kMaxColumns;
    uint8_t bytes[kMaxColumns * kDepthBytes];

    uint8_t* row(uint32_t index) { return bytes + index * kDepthBytes; }
    uint8_t* line(uint32_t k) { return bytes + k * kLineBytes; }
};

struct MultiplyShape {
    uint32_t columns;  // N: a multiple of 8, at most 256
    MatrixElement a, b;
    bool mn_major_a, mn_major_b;

    uint32_t depth() const { return kDepthBytes / element_bytes(a); }
};

/// d[kWarpRows][columns] (+)= a b^T.
using MultiplyFunction = void (*)(const MultiplyShape& shape, RawOperand& a, RawOperand& b, bool accumulate,
                                  float* d);

struct MultiplyIsa {
    const char* name;  // "portable", "avx2", "avx512"
    MultiplyFunction multiply;
};

/// The instruction sets that this processor runs, the best one first.
const std::vector<MultiplyIsa>& multiply_isas();

}  // namespace mok::emu
