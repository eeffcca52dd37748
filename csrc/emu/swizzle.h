// The permutation of 16-byte pieces that TMA writes and wgmma reads: bits 4 to 6 of a shared address are
// xored with as many of its bits 7 to 9 as the swizzle's width has pieces. Absolute addresses, so a tile that
// does not start on 8 lines shows here as it does on the device.
#pragma once

#include <cstdint>

namespace mok::emu {

/// The bytes that all swizzles and 8x8 matrices move together.
constexpr uint32_t kPieceBytes = 16;

/// `width`: 128, 64 or 32 bytes a line; 16: no swizzle.
constexpr uint32_t swizzled(uint32_t address, uint32_t width) {
    const uint32_t mask = width / kPieceBytes - 1;
    return address ^ ((address >> 7 & mask) << 4);
}

}  // namespace mok::emu
