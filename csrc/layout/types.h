// Scalar types and integer helpers shared by host and device code. No torch, no CUDA calls.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define MOK_HD __host__ __device__ __forceinline__
#else
#define MOK_HD inline
#endif

namespace mok {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1 };

MOK_HD int64_t dtype_bytes(DType dtype) {
    return dtype == DType::kFloat32 ? 4 : 2;
}

template <typename T>
MOK_HD constexpr T ceil_div(T value, T divisor) {
    return (value + divisor - 1) / divisor;
}

template <typename T>
MOK_HD constexpr T round_up(T value, T multiple) {
    return ceil_div(value, multiple) * multiple;
}

/// BF16 as its bit pattern: the upper half of an FP32.
struct bf16 {
    uint16_t bits;
};

MOK_HD float to_float(bf16 value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    memcpy(&result, &bits, sizeof(result));
    return result;
}

MOK_HD float to_float(float value) {
    return value;
}

/// Round to nearest, ties to even; a NaN stays a (quiet) NaN, whatever its payload.
MOK_HD bf16 round_to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>((bits >> 16) | 0x0040u)};
    return bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

/// rn(.) of the numerics contract: one rounding for BF16, the identity for FP32.
template <typename T>
MOK_HD T round_to(float value);
template <>
MOK_HD bf16 round_to<bf16>(float value) {
    return round_to_bf16(value);
}
template <>
MOK_HD float round_to<float>(float value) {
    return value;
}

}  // namespace mok
