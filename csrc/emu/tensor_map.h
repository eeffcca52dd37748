// What a tensor map holds in the emulator, and the walk over a box: which bytes of shared memory belong to
// which bytes of the tensor.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "csrc/emu/swizzle.h"

namespace mok::emu {

constexpr uint32_t kMaxTensorRank = 5;

/// What an element is to a reduction; copies move bytes.
enum class TensorElement : uint8_t { kBytes, kBFloat16, kFloat32 };

/// Dimension 0 is innermost and contiguous. Lies in the 128 bytes of a ptx::TensorMap.
struct TensorMapFields {
    uint64_t magic;  // kTensorMapMagic: the map was made by the emulator
    char* base;
    uint64_t sizes[kMaxTensorRank];             // elements
    uint64_t stride_bytes[kMaxTensorRank - 1];  // of dimensions 1 and up
    uint16_t box[kMaxTensorRank];               // elements
    uint8_t rank;
    uint8_t element_bytes;
    uint8_t swizzle_width;  // 16: none
    TensorElement element;

    uint32_t line_bytes() const { return uint32_t{box[0]} * element_bytes; }
    /// What a load of it completes, whatever lies outside the tensor.
    uint32_t box_bytes() const {
        uint32_t bytes = line_bytes();
        for (uint32_t i = 1; i < rank; ++i) bytes *= box[i];
        return bytes;
    }
};

constexpr uint64_t kTensorMapMagic = 0x70616d20726f736eu;
static_assert(sizeof(TensorMapFields) <= 128);

/// One line of a box (its innermost dimension). What lies inside the tensor is one run of bytes of it.
struct BoxLine {
    uint32_t linear;  // shared address of the line's first byte before the swizzle
    uint32_t bytes;
    uint32_t inside_begin, inside_end;  // bytes of the line; equal where all of it lies outside
    char* global;                       // the tensor's byte at inside_begin

    /// Where the piece at byte `at` of the line (a multiple of 16) lies in shared memory.
    uint32_t shared(uint32_t at, uint32_t swizzle_width) const {
        return swizzled(linear + at, swizzle_width);
    }
};

/// Calls `f(BoxLine)` for each line of the box whose corner is element `at`, in shared memory's order from
/// address `shared` on.
template <typename F>
void for_each_line(const TensorMapFields& map, const int32_t* at, uint32_t shared, const F& f) {
    BoxLine line{shared, map.line_bytes(), 0, 0, nullptr};
    const int64_t size = static_cast<int64_t>(map.sizes[0]), x = at[0], box = map.box[0];
    const int64_t begin = std::clamp<int64_t>(-x, 0, box), end = std::clamp<int64_t>(size - x, begin, box);
    uint32_t index[kMaxTensorRank] = {};
    for (;;) {
        bool inside = begin < end;
        int64_t offset = (x + begin) * map.element_bytes;
        for (uint32_t i = 1; i < map.rank; ++i) {
            const int64_t place = int64_t{at[i]} + index[i];
            inside = inside && place >= 0 && place < static_cast<int64_t>(map.sizes[i]);
            offset += place * static_cast<int64_t>(map.stride_bytes[i - 1]);
        }
        line.inside_begin = inside ? static_cast<uint32_t>(begin) * map.element_bytes : 0;
        line.inside_end = inside ? static_cast<uint32_t>(end) * map.element_bytes : 0;
        line.global = inside ? map.base + offset : nullptr;
        f(static_cast<const BoxLine&>(line));
        line.linear += line.bytes;
        uint32_t i = 1;
        while (i < map.rank && ++index[i] == map.box[i]) index[i++] = 0;
        if (i >= map.rank) return;
    }
}

/// A reduction's new value of the element at `target`, in place: round to nearest, ties to even, subnormal
/// values kept (measured on an H200 for both types).
void reduce_add(TensorElement element, char* target, const char* addend, uint32_t bytes);

}  // namespace mok::emu
