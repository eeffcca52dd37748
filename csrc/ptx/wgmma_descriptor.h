// Shared-memory matrix descriptors of wgmma, as plain arithmetic.
//
// An operand tile lies in shared memory as TMA writes it: lines of W bytes (W = 128, 64 or 32, the swizzle's
// width) one after another, 8 lines an atom, the 16-byte pieces of a line permuted by the low bits of its
// address. K-major: a line is one row (of M or N) with W bytes of K. MN-major: a line is one k with W bytes
// of M or N; wider operands are panels of such lines, one after another. Tiles start at multiples of 8 W.
#pragma once

#include <cstdint>

namespace mok::ptx {

/// In wgmma's own encoding, which is neither a tensor map's nor tcgen05's.
enum class Swizzle : uint32_t { k128B = 1, k64B = 2, k32B = 3 };

/// Which dimension of an operand is contiguous; the value is wgmma's transpose immediate.
enum class Major : int { kK = 0, kMN = 1 };

constexpr uint32_t swizzle_width(Swizzle swizzle) {
    return 256u >> static_cast<uint32_t>(swizzle);
}

/// Where the byte of linear address `address` lies: bits 4.. are xored with the line number's low bits.
constexpr uint32_t swizzled(uint32_t address, Swizzle swizzle) {
    const uint32_t mask = swizzle_width(swizzle) / 16 - 1;
    return address ^ (((address >> 7) & mask) << 4);
}

constexpr uint64_t wgmma_descriptor(uint32_t address, uint32_t leading_bytes, uint32_t stride_bytes,
                                    Swizzle swizzle) {
    const auto encoded = [](uint32_t bytes) { return static_cast<uint64_t>((bytes & 0x3ffffu) >> 4); };
    return encoded(address) | encoded(leading_bytes) << 16 | encoded(stride_bytes) << 32 |
           static_cast<uint64_t>(swizzle) << 62;
}

/// K-major: 8 rows of W bytes to the next 8; the leading offset is not used.
constexpr uint64_t k_major_descriptor(uint32_t address, Swizzle swizzle) {
    return wgmma_descriptor(address, 0, 8 * swizzle_width(swizzle), swizzle);
}

/// MN-major: `panel_bytes` from one panel of W bytes of M or N to the next (lines of a panel times W).
constexpr uint64_t mn_major_descriptor(uint32_t address, uint32_t panel_bytes, Swizzle swizzle) {
    return wgmma_descriptor(address, panel_bytes, 8 * swizzle_width(swizzle), swizzle);
}

/// `bytes` further on; no carry leaves the address field while tiles stay below 256 KiB.
constexpr uint64_t advanced(uint64_t descriptor, uint32_t bytes) {
    return descriptor + (bytes >> 4);
}

/// Bytes from one k16 step of a 16-bit operand to the next: 32 inside a K-major line (W / 32 steps, then the
/// next tile), 16 lines MN-major.
constexpr uint32_t k16_step_bytes(Major major, Swizzle swizzle) {
    return major == Major::kK ? 32 : 16 * swizzle_width(swizzle);
}

static_assert(k_major_descriptor(0x8000, Swizzle::k128B) == 0x4000004000000800u);
static_assert(k_major_descriptor(0x8000, Swizzle::k64B) == 0x8000002000000800u);
static_assert(k_major_descriptor(0x8000, Swizzle::k32B) == 0xc000001000000800u);
static_assert(mn_major_descriptor(0x8000, 8192, Swizzle::k128B) == 0x4000004002000800u);
static_assert(advanced(mn_major_descriptor(0x8000, 8192, Swizzle::k128B), 2048) == 0x4000004002000880u);

}  // namespace mok::ptx
