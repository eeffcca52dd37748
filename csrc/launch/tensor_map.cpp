#include "csrc/launch/tensor_map.h"

#include "csrc/layout/check.h"

namespace mok::launch {

void check_tensor_map(const TensorMapSpec& spec) {
    constexpr uint64_t kMostElements = uint64_t{1} << 32, kStrideLimit = uint64_t{1} << 40;
    const uint32_t bytes = element_bytes(spec.type), width = swizzle_bytes(spec.swizzle);
    MOK_CHECK(spec.rank >= 1 && spec.rank <= kMaxTensorRank, "tensor map: ", spec.rank,
              " dimensions; there must be 1 to ", kMaxTensorRank, ".");
    for (uint32_t i = 0; i < spec.rank; ++i) {
        MOK_CHECK(spec.sizes[i] >= 1 && spec.sizes[i] <= kMostElements, "tensor map: dimension ", i, " has ",
                  spec.sizes[i], " elements; it must have 1 to 2^32.");
        MOK_CHECK(spec.box[i] >= 1 && spec.box[i] <= 256, "tensor map: box[", i, "] is ", spec.box[i],
                  "; it must be 1 to 256 elements.");
    }
    for (uint32_t i = 1; i < spec.rank; ++i) {
        const uint64_t stride = spec.stride_bytes[i - 1];
        MOK_CHECK(stride % 16 == 0 && stride < kStrideLimit, "tensor map: dimension ", i, " has a stride of ",
                  stride, " bytes; it must be a multiple of 16 below 2^40; pad its rows.");
    }
    MOK_CHECK(spec.base != nullptr && reinterpret_cast<uintptr_t>(spec.base) % 16 == 0, "tensor map: base ",
              spec.base, " must be a multiple of 16; align the tensor.");
    const uint32_t line = spec.box[0] * bytes;
    MOK_CHECK(line % 16 == 0, "tensor map: box[0] is ", spec.box[0], " elements of ", bytes,
              " bytes; a line of the box must be a multiple of 16 bytes.");
    // The driver takes shorter lines; where the next one begins is written nowhere.
    MOK_CHECK(width == 0 || line == width, "tensor map: box[0] is ", spec.box[0], " elements of ", bytes,
              " bytes; a line of the box must be as wide as the swizzle, ", width, " bytes.");
}

}  // namespace mok::launch
