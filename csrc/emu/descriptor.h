// wgmma's shared-memory matrix descriptors, decoded: the bits are read here independently of
// csrc/ptx/wgmma_descriptor.h, which writes them.
#pragma once

#include <cstdint>

#include "csrc/emu/swizzle.h"

namespace mok::emu {

struct MatrixDescriptor {
    uint32_t start;
    uint32_t leading_bytes;
    uint32_t stride_bytes;
    uint32_t width;  // of a swizzled line; 16: no swizzle

    /// Shared address of the 16 bytes of row `row` (of M or N) from byte `k_byte` of K on, K-major.
    uint32_t k_major(uint32_t row, uint32_t k_byte) const {
        const uint32_t line = start + row / 8 * stride_bytes + row % 8 * width;
        return width == kPieceBytes ? line + k_byte / kPieceBytes * leading_bytes
                                    : swizzled(line + k_byte, width);
    }

    /// Shared address of the 16 bytes of line `k` from byte `mn_byte` of M or N on, MN-major. Without a
    /// swizzle the two offsets change roles.
    uint32_t mn_major(uint32_t mn_byte, uint32_t k) const {
        if (width == kPieceBytes) {
            return start + mn_byte / kPieceBytes * stride_bytes + k / 8 * leading_bytes + k % 8 * kPieceBytes;
        }
        const uint32_t panel = start + mn_byte / width * leading_bytes + mn_byte % width;
        return swizzled(panel + k / 8 * stride_bytes + k % 8 * width, width);
    }
};

constexpr MatrixDescriptor decode_descriptor(uint64_t bits) {
    constexpr uint32_t kWidths[4] = {16, 128, 64, 32};
    const auto field = [bits](int first) { return static_cast<uint32_t>(bits >> first & 0x3fff) << 4; };
    return {field(0), field(16), field(32), kWidths[bits >> 62]};
}

/// Why the hardware would not read the tile that this descriptor is meant for; null: nothing is wrong.
constexpr const char* descriptor_fault(uint64_t bits, bool mn_major) {
    constexpr uint64_t kBaseOffset = uint64_t{7} << 49;
    constexpr uint64_t kFields = 0x3fff | uint64_t{0x3fff} << 16 | uint64_t{0x3fff} << 32 | uint64_t{3} << 62;
    if (bits & kBaseOffset) return "it has a base offset: start every tile at a multiple of 8 lines instead";
    if (bits & ~kFields) return "it has reserved bits set (14-15, 30-31, 46-48, 52-61)";
    const MatrixDescriptor descriptor = decode_descriptor(bits);
    const uint32_t in_line = descriptor.start % descriptor.width;
    if (mn_major && in_line != 0) {
        return "it starts inside an MN-major line: advance it by whole lines or panels";
    }
    constexpr uint32_t kStepBytes = 32;  // of K in one instruction
    if (!mn_major && descriptor.width > kPieceBytes && in_line + kStepBytes > descriptor.width) {
        return "its 32 bytes of K run past the end of a line: advance it to the next panel";
    }
    return nullptr;
}

}  // namespace mok::emu
