// Elements of matrices as FP32, exactly, and BF16 back.
#pragma once

#include <bit>
#include <cstdint>

namespace mok::emu {

enum class MatrixElement : uint8_t { kBFloat16, kE4M3, kE5M2 };

constexpr uint32_t element_bytes(MatrixElement element) {
    return element == MatrixElement::kBFloat16 ? 2 : 1;
}

constexpr float bfloat16_value(uint16_t bits) {
    return std::bit_cast<float>(uint32_t{bits} << 16);
}

/// To nearest, ties to even; a NaN stays a quiet NaN with its payload's upper bits.
constexpr uint16_t bfloat16_bits(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

/// An 8-bit float of kMantissa mantissa bits. E4M3 has no infinities: only S.1111.111 is NaN.
template <int kMantissa>
constexpr float float8_value(uint8_t bits) {
    constexpr int kExponents = 7 - kMantissa, kBias = (1 << (kExponents - 1)) - 1;
    constexpr bool kHasInfinity = kMantissa == 2;
    const int exponent = bits >> kMantissa & ((1 << kExponents) - 1),
              mantissa = bits & ((1 << kMantissa) - 1);
    const uint32_t sign = uint32_t{bits} >> 7 << 31;
    const bool top = exponent == (1 << kExponents) - 1;
    if (top && (kHasInfinity || mantissa == (1 << kMantissa) - 1)) {
        const bool infinity = kHasInfinity && mantissa == 0;
        return std::bit_cast<float>(sign | (infinity ? 0x7f800000u : 0x7fc00000u));
    }
    // Both factors are exact: an integer of a few bits and a power of two of FP32's normal range.
    const int digits = exponent == 0 ? mantissa : mantissa | 1 << kMantissa;
    const int scale = (exponent == 0 ? 1 : exponent) - kBias - kMantissa;
    const float power = std::bit_cast<float>(static_cast<uint32_t>(scale + 127) << 23);
    const float magnitude = static_cast<float>(digits) * power;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

constexpr float e4m3_value(uint8_t bits) {
    return float8_value<3>(bits);
}
constexpr float e5m2_value(uint8_t bits) {
    return float8_value<2>(bits);
}

static_assert(e4m3_value(0x7e) == 448.0f && e4m3_value(0x01) == 0x1p-9f && e4m3_value(0xb8) == -1.0f);
static_assert(e5m2_value(0x7b) == 57344.0f && e5m2_value(0x01) == 0x1p-16f && e5m2_value(0xbc) == -1.0f);

}  // namespace mok::emu
