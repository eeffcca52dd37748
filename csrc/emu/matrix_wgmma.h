// What the machine calls for a warp's part of a wgmma: operands are gathered as the descriptors say and
// multiplied.
#pragma once

#include <cstdint>

#include "csrc/emu/descriptor.h"
#include "csrc/emu/machine.h"
#include "csrc/emu/matrix_multiply.h"

namespace mok::emu {

struct WgmmaKind {
    MatrixElement a, b;  // both BF16, or both FP8 of either sort
    bool mn_major_a, mn_major_b;

    constexpr uint64_t options() const {
        return uint64_t{mn_major_a} | uint64_t{mn_major_b} << 1 | static_cast<uint64_t>(a) << 8 |
               static_cast<uint64_t>(b) << 16;
    }
    static constexpr WgmmaKind from(uint64_t options) {
        return {static_cast<MatrixElement>(options >> 8 & 0xff),
                static_cast<MatrixElement>(options >> 16 & 0xff), (options & 1) != 0,
                (options >> 1 & 1) != 0};
    }
};

/// The operation for wgmma_issue; fails where a descriptor cannot be meant so. `columns` is N.
Wgmma make_wgmma(uint64_t a, uint64_t b, uint32_t columns, bool accumulate, const WgmmaKind& kind);

/// 16 rows of A, or N of B, from row `first` on, out of shared memory (by address).
void gather(MatrixDescriptor descriptor, bool mn_major, uint32_t first, uint32_t rows, const uint8_t* shared,
            RawOperand& raw);

/// The whole swizzle atoms that `gather` reads from.
SharedRange gathered_range(MatrixDescriptor descriptor, bool mn_major, uint32_t first, uint32_t rows);

}  // namespace mok::emu
