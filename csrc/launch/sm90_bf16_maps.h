// Tensor maps of BF16 matrices as the kernels of csrc/gemm load and store them. For .cu files.
#pragma once

#include <cstdint>

#include "csrc/launch/tensor_map.h"
#include "csrc/launch/weight_view.h"
#include "csrc/layout/check.h"

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

/// In boxes of `box_rows` rows of one expert; empty without weights.
inline ptx::TensorMap weight_map(const WeightView& weights, uint32_t box_rows = kMapWeightBox) {
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
    spec.box[1] = box_rows;
    spec.box[2] = 1;
    spec.swizzle = TensorSwizzle::k128B;
    return make_tensor_map(spec);
}

/// A gradient of [experts, rows, columns], in boxes of 64 rows and 128 bytes; empty where it is not wanted.
inline ptx::TensorMap gradient_map(const GradientView& gradient, int64_t experts, int64_t rows,
                                   int64_t columns) {
    if (gradient.data == nullptr) return {};
    const TensorType type = gradient.is_float32 ? TensorType::kFloat32 : TensorType::kBFloat16;
    TensorMapSpec spec{};
    spec.type = type;
    spec.rank = 3;
    spec.base = gradient.data;
    spec.sizes[0] = static_cast<uint64_t>(columns);
    spec.sizes[1] = static_cast<uint64_t>(rows);
    spec.sizes[2] = static_cast<uint64_t>(experts);
    spec.stride_bytes[0] = static_cast<uint64_t>(gradient.row_stride);
    spec.stride_bytes[1] = static_cast<uint64_t>(gradient.expert_stride);
    spec.box[0] = swizzle_bytes(TensorSwizzle::k128B) / element_bytes(type);
    spec.box[1] = kMapRowBox;
    spec.box[2] = 1;
    spec.swizzle = TensorSwizzle::k128B;
    return make_tensor_map(spec);
}

inline void check_weights(const char* name, const WeightView& view, int64_t experts, int64_t rows,
                          int64_t columns) {
    MOK_CHECK(view.data != nullptr && view.experts == experts && view.rows == rows && view.columns == columns,
              name, " is [", view.experts, ", ", view.rows, ", ", view.columns, "]: must be [", experts, ", ",
              rows, ", ", columns, "].");
}

}  // namespace mok::launch
