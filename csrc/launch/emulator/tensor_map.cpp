#include "csrc/launch/tensor_map.h"

#include <cstring>

#include "csrc/emu/tensor_map.h"

namespace mok::launch {

namespace {

emu::TensorElement element_of(TensorType type) {
    switch (type) {
        case TensorType::kUint8:
            return emu::TensorElement::kBytes;
        case TensorType::kBFloat16:
            return emu::TensorElement::kBFloat16;
        case TensorType::kFloat32:
            return emu::TensorElement::kFloat32;
    }
    __builtin_unreachable();
}

}  // namespace

ptx::TensorMap make_tensor_map(const TensorMapSpec& spec) {
    static_assert(kMaxTensorRank == emu::kMaxTensorRank);
    check_tensor_map(spec);
    emu::TensorMapFields fields{};
    fields.magic = emu::kTensorMapMagic;
    fields.base = static_cast<char*>(spec.base);
    for (uint32_t i = 0; i < spec.rank; ++i) {
        fields.sizes[i] = spec.sizes[i];
        fields.box[i] = static_cast<uint16_t>(spec.box[i]);
        if (i > 0) fields.stride_bytes[i - 1] = spec.stride_bytes[i - 1];
    }
    fields.rank = static_cast<uint8_t>(spec.rank);
    fields.element_bytes = static_cast<uint8_t>(element_bytes(spec.type));
    const uint32_t width = swizzle_bytes(spec.swizzle);
    fields.swizzle_width = static_cast<uint8_t>(width == 0 ? emu::kPieceBytes : width);
    fields.element = element_of(spec.type);
    ptx::TensorMap map{};
    std::memcpy(&map, &fields, sizeof(fields));
    return map;
}

}  // namespace mok::launch
