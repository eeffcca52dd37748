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

/// sigmoid(x) and 1 - sigmoid(x).
struct Sigmoid {
    float value, complement;
};

/// Both within 1e-6 (relative) of the exact values, those below 2^-126 as zero; NaN stays NaN. Two
/// approximations (ex2, rcp) and eleven plain instructions (sm_80).
MOK_DEVICE Sigmoid sigmoid(float x) {
    constexpr float kLog2E = 0x1.715476p+0f, kLog2ERest = 0x1.4ae0cp-26f, kLn2 = 0x1.62e43p-1f;
    // e^-100 is zero all the same, and infinity would become NaN below.
    float magnitude;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(magnitude) : "f"(fabsf(x)), "f"(100.0f));
    // e^-|x| = 2^power (1 + rest ln 2): the rounding of the power, 2^-18 at most, would show in 2^power.
    const float power = -magnitude * kLog2E;
    float rest = __fmaf_rn(-magnitude, kLog2E, -power);
    rest = __fmaf_rn(-magnitude, kLog2ERest, rest);
    const float rough = exp2_approx(power);
    const float decay = __fmaf_rn(rough, rest * kLn2, rough);
    // The smaller one as a product, not as a difference from 1, keeps its relative accuracy.
    const float larger = reciprocal_approx(1.0f + decay), smaller = decay * larger;
    const bool negative = x < 0.0f;
    return {negative ? smaller : larger, negative ? larger : smaller};
}

/// fma.rn.f32: one rounding, subnormals kept (sm_20).
MOK_DEVICE float fused_multiply_add(float a, float b, float c) {
    return __fmaf_rn(a, b, c);
}

}  // namespace mok::ptx
