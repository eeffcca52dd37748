// csrc/ptx/device/convert.cuh in plain C++. What the device only approximates is rounded correctly here,
// except sigmoid: it has the CPU executor's bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "csrc/emu/matrix_element.h"

namespace mok::ptx {

/// cvt.rn.bf16x2.f32.
inline uint32_t pack_bf16(float low, float high) {
    return emu::bfloat16_bits(low) | uint32_t{emu::bfloat16_bits(high)} << 16;
}

/// The lower BF16 of a register as FP32, exactly.
inline float low_bf16(uint32_t packed) {
    return std::bit_cast<float>(packed << 16);
}

/// The upper BF16 of a register as FP32, exactly.
inline float high_bf16(uint32_t packed) {
    return std::bit_cast<float>(packed & 0xffff0000u);
}

/// The bits of an FP32 and back.
inline uint32_t float_bits(float value) {
    return std::bit_cast<uint32_t>(value);
}
inline float bits_float(uint32_t bits) {
    return std::bit_cast<float>(bits);
}

namespace convert_detail {

/// ftz: a subnormal number is a zero of its sign.
inline float flushed(float value) {
    return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

}  // namespace convert_detail

/// ex2.approx.ftz.
inline float exp2_approx(float x) {
    return convert_detail::flushed(static_cast<float>(std::exp2(double{convert_detail::flushed(x)})));
}

/// rcp.approx.ftz.
inline float reciprocal_approx(float x) {
    return convert_detail::flushed(1.0f / convert_detail::flushed(x));
}

/// fma.rn.f32.
inline float fused_multiply_add(float a, float b, float c) {
    return __builtin_fmaf(a, b, c);
}

struct Sigmoid {
    float value, complement;
};

/// sigmoid(x) and 1 - sigmoid(x): csrc/cpu/activation_impl.h for one lane, so that an emulated kernel equals
/// the executor bit for bit. Defined beside the executor, above this layer: csrc/cpu/sigmoid.cpp.
Sigmoid sigmoid(float x);

}  // namespace mok::ptx
