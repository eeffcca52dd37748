#include "csrc/emu/tensor_map.h"

#include <cstring>

#include "csrc/emu/matrix_element.h"

namespace mok::emu {

namespace {

void add_float(char* target, const char* addend) {
    float sum, other;
    std::memcpy(&sum, target, sizeof(sum));
    std::memcpy(&other, addend, sizeof(other));
    sum += other;
    std::memcpy(target, &sum, sizeof(sum));
}

void add_bfloat16(char* target, const char* addend) {
    uint16_t sum, other;
    std::memcpy(&sum, target, sizeof(sum));
    std::memcpy(&other, addend, sizeof(other));
    // Two roundings give the same bits as one: an FP32 has more than twice a BF16's digits and two.
    sum = bfloat16_bits(bfloat16_value(sum) + bfloat16_value(other));
    std::memcpy(target, &sum, sizeof(sum));
}

}  // namespace

void reduce_add(TensorElement element, char* target, const char* addend, uint32_t bytes) {
    const bool wide = element == TensorElement::kFloat32;
    for (uint32_t at = 0; at < bytes; at += wide ? 4 : 2) {
        wide ? add_float(target + at, addend + at) : add_bfloat16(target + at, addend + at);
    }
}

}  // namespace mok::emu
