// Conversions and approximations.
#pragma once

#include "csrc/ptx/device/base.cuh"

namespace mok::ptx {

/// cvt.rn.bf16x2.f32: two BF16 in one register, `low` in the lower half; to nearest, ties to even, NaN stays
/// NaN (sm_80).
MOK_DEVICE uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

/// The lower BF16 of a register as FP32, exactly (all architectures).
MOK_DEVICE float low_bf16(uint32_t packed) {
    return __uint_as_float(packed << 16);
}

/// The upper BF16 of a register as FP32, exactly (all architectures).
MOK_DEVICE float high_bf16(uint32_t packed) {
    return __uint_as_float(packed & 0xffff0000u);
}

/// The bits of an FP32 and back (all architectures).
MOK_DEVICE uint32_t float_bits(float value) {
    return __float_as_uint(value);
}
MOK_DEVICE float bits_float(uint32_t bits) {
    return __uint_as_float(bits);
}

/// ex2.approx.ftz: 2^x within 2 ulp (sm_20).
MOK_DEVICE float exp2_approx(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

/// rcp.approx.ftz: 1 / x within 1 ulp (sm_20).
MOK_DEVICE float reciprocal_approx(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

/// fma.rn.f32: one rounding, subnormals kept (sm_20).
MOK_DEVICE float fused_multiply_add(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
}

}  // namespace mok::ptx
