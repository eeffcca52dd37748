// Tensor maps for TMA: what they describe, and their makers. On the device the driver encodes them
// (tensor_map.cu); in the emulator they hold the fields themselves (emulator/tensor_map.cpp).
#pragma once

#include <cstdint>

#include "csrc/ptx/tensor_map_type.h"

namespace mok::launch {

/// What TMA adds in a reduction; a load or store moves elements of any meaning as kUint8, kBFloat16, kFloat32
/// by their size.
enum class TensorType : int32_t { kUint8, kBFloat16, kFloat32 };

constexpr uint32_t element_bytes(TensorType type) {
    return type == TensorType::kUint8 ? 1 : type == TensorType::kBFloat16 ? 2 : 4;
}

/// As tensor maps number them; wgmma's descriptors have their own order (ptx::Swizzle).
enum class TensorSwizzle : int32_t { kNone = 0, k32B = 1, k64B = 2, k128B = 3 };

/// Bytes of a line; 0: none.
constexpr uint32_t swizzle_bytes(TensorSwizzle swizzle) {
    return swizzle == TensorSwizzle::kNone ? 0 : 16u << static_cast<int32_t>(swizzle);
}

constexpr uint32_t kMaxTensorRank = 5;

/// A dense tensor of up to 5 dimensions, innermost first, and the box that one copy moves.
struct TensorMapSpec {
    TensorType type;
    uint32_t rank;
    void* base;                                 // 16-byte aligned
    uint64_t sizes[kMaxTensorRank];             // elements
    uint64_t stride_bytes[kMaxTensorRank - 1];  // of dimensions 1 and up; multiples of 16
    uint32_t box[kMaxTensorRank];               // elements, at most 256 each; box[0] is one swizzled line
    TensorSwizzle swizzle = TensorSwizzle::kNone;
};

/// Throws std::invalid_argument naming the rule of cuTensorMapEncodeTiled that `spec` breaks.
void check_tensor_map(const TensorMapSpec& spec);

/// Throws std::invalid_argument, and CudaError where the driver has no encoder or refuses all the same.
ptx::TensorMap make_tensor_map(const TensorMapSpec& spec);

}  // namespace mok::launch
