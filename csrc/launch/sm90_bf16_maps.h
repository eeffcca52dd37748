// Tensor maps of BF16 matrices as the kernels of csrc/gemm load and store them. For .cu files.
#pragma once

#include <cstdint>

#include "csrc/launch/tensor_map.h"
#include "csrc/launch/weight_view.h"

namespace mok::launch {

inline constexpr uint32_t kMapBoxColumns = 64, kMapRowBox = 64, kMapWeightBox = 128;

/// [rows, columns] with a row stride in bytes, in boxes of 64 x 64. Without rows or base the map stays empty:
/// no task uses it.
inline ptx::TensorMap row_map(const void* base, int64_t rows, int64_t columns, int64_t row_stride) {
    if (base == nullptr || rows == 0 || columns == 0) return {};
    TensorMapSpec spec{};
    spec.type = TensorType::kBFloat16;
    spec.rank = 2;
    spec.base = const_cast<void*>(base);
    spec.sizes[0] = static_cast<uint64_t>(columns);
    spec.sizes[1] = static_cast<uint64_t>(rows);
    spec.stride_bytes[0] = static_cast<uint64_t>(row_stride);
    spec.box[0] = kMapBoxColumns;
    spec.box[1] = kMapRowBox;
    spec.swizzle = TensorSwizzle::k128B;
    return make_tensor_map(spec);
}

/// In boxes of 128 rows of one expert; empty without weights.
inline ptx::TensorMap weight_map(const WeightView& weights) {
    if (weights.data == nullptr) return {};
    TensorMapSpec spec{};
    spec.type = TensorType::kBFloat16;
    spec.rank = 3;
    spec.base = const_cast<void*>(weights.data);
    spec.sizes[0] = static_cast<uint64_t>(weights.columns);
    spec.sizes[1] = static_cast<uint64_t>(weights.rows);
    spec.sizes[2] = static_cast<uint64_t>(weights.experts);
    spec.stride_bytes[0] = static_cast<uint64_t>(weights.row_stride);
    spec.stride_bytes[1] = static_cast<uint64_t>(weights.expert_stride);
    spec.box[0] = kMapBoxColumns;
    spec.box[1] = kMapWeightBox;
    spec.box[2] = 1;
    spec.swizzle = TensorSwizzle::k128B;
    return make_tensor_map(spec);
}

}  // namespace mok::launch
