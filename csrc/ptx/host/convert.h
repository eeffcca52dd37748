// csrc/ptx/device/convert.cuh in plain C++. What the device only approximates is rounded correctly here,
// except sigmoid: it has the CPU executor's bits.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "csrc/emu/matrix_element.h"
#include "csrc/ptx/host/base.h"

namespace mok::ptx {

/// cvt.rn.bf16x2.f32.
MOK_DEVICE uint32_t pack_bf16(float low, float high) {
    return emu::bfloat16_bits(low) | uint32_t{emu::bfloat16_bits(high)} << 16;
}

/// The lower BF16 of a register as FP32, exactly.
MOK_DEVICE float low_bf16(uint32_t packed) {
    return std::bit_cast<float>(packed << 16);
}

/// The upper BF16 of a register as FP32, exactly.
MOK_DEVICE float high_bf16(uint32_t packed) {
    return std::bit_cast<float>(packed & 0xffff0000u);
}

/// The bits of an FP32 and back.
MOK_DEVICE uint32_t float_bits(float value) {
    return std::bit_cast<uint32_t>(value);
}
MOK_DEVICE float bits_float(uint32_t bits) {
    return std::bit_cast<float>(bits);
}

namespace convert_detail {

/// ftz: a subnormal number is a zero of its sign.
inline float flushed(float value) {
    return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

}  // namespace convert_detail

/// ex2.approx.ftz.
MOK_DEVICE float exp2_approx(float x) {
    return convert_detail::flushed(static_cast<float>(std::exp2(double{convert_detail::flushed(x)})));
}

/// rcp.approx.ftz.
MOK_DEVICE float reciprocal_approx(float x) {
    return convert_detail::flushed(1.0f / convert_detail::flushed(x));
}

/// fma.rn.f32.
MOK_DEVICE float fused_multiply_add(float a, float b, float c) {
    return __builtin_fmaf(a, b, c);
}

struct Sigmoid {
    float value, complement;
};

namespace convert_detail {

/// csrc/cpu/activation_impl.h for one lane. Defined beside it, in csrc/cpu/emulator/sigmoid.cpp.
Sigmoid executor_sigmoid(float x);

}  // namespace convert_detail

/// sigmoid(x) and 1 - sigmoid(x) with the executor's bits, so that an emulated kernel equals it bit for bit.
MOK_DEVICE Sigmoid sigmoid(float x) {
    return convert_detail::executor_sigmoid(x);
}

}  // namespace mok::ptx
