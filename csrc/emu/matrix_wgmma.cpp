#include "csrc/emu/matrix_wgmma.h"

#include <cstring>
#include <string>

namespace mok::emu {

namespace {

void compute(const Wgmma& op, uint32_t warp_in_group, const uint8_t* shared, float* d) {
    static const MultiplyFunction multiply = multiply_isas().front().multiply;
    static RawOperand a, b;
    const WgmmaKind kind = WgmmaKind::from(op.options);
    gather(decode_descriptor(op.a), kind.mn_major_a, warp_in_group * kWarpRows, kWarpRows, shared, a);
    gather(decode_descriptor(op.b), kind.mn_major_b, 0, op.columns, shared, b);
    multiply({op.columns, kind.a, kind.b, kind.mn_major_a, kind.mn_major_b}, a, b, op.accumulate != 0, d);
}

void ranges(const Wgmma& op, uint32_t warp_in_group, SharedRange (&reads)[2]) {
    const WgmmaKind kind = WgmmaKind::from(op.options);
    reads[0] = gathered_range(decode_descriptor(op.a), kind.mn_major_a, warp_in_group * kWarpRows, kWarpRows);
    reads[1] = gathered_range(decode_descriptor(op.b), kind.mn_major_b, 0, op.columns);
}

void check(const char* operand, uint64_t descriptor, bool mn_major) {
    if (const char* fault = descriptor_fault(descriptor, mn_major)) {
        fail(ErrorKind::kUsage, std::string("has a wrong descriptor of ") + operand + ": " + fault);
    }
}

}  // namespace

Wgmma make_wgmma(uint64_t a, uint64_t b, uint32_t columns, bool accumulate, const WgmmaKind& kind) {
    check("A", a, kind.mn_major_a);
    check("B", b, kind.mn_major_b);
    return {a, b, columns, accumulate ? 1u : 0u, kind.options(), compute, ranges};
}

void gather(MatrixDescriptor descriptor, bool mn_major, uint32_t first, uint32_t rows, const uint8_t* shared,
            RawOperand& raw) {
    if (mn_major) {
        const uint32_t bytes = 2 * rows, first_byte = 2 * first;
        for (uint32_t k = 0; k < kDepthBytes / 2; ++k) {
            for (uint32_t at = 0; at < bytes; at += kPieceBytes) {
                std::memcpy(raw.line(k) + at, shared + descriptor.mn_major(first_byte + at, k), kPieceBytes);
            }
        }
        return;
    }
    for (uint32_t i = 0; i < rows; ++i) {
        for (uint32_t at = 0; at < kDepthBytes; at += kPieceBytes) {
            std::memcpy(raw.row(i) + at, shared + descriptor.k_major(first + i, at), kPieceBytes);
        }
    }
}

SharedRange gathered_range(MatrixDescriptor descriptor, bool mn_major, uint32_t first, uint32_t rows) {
    const uint32_t atom_bytes = 8 * descriptor.width;
    // All offsets are positive, so the first and the last piece bound the rest.
    const uint32_t last = first + rows - 1;
    const uint32_t begin = mn_major ? descriptor.mn_major(2 * first, 0) : descriptor.k_major(first, 0);
    const uint32_t end = mn_major
                             ? descriptor.mn_major(2 * last / kPieceBytes * kPieceBytes, kDepthBytes / 2 - 1)
                             : descriptor.k_major(last, kDepthBytes - kPieceBytes);
    return {begin / atom_bytes * atom_bytes, end / atom_bytes * atom_bytes + atom_bytes};
}

}  // namespace mok::emu
