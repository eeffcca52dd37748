// csrc/ptx/device/matrix.cuh on the emulated machine.
#pragma once

#include <cstdint>
#include <cstring>

#include "csrc/ptx/host/base.h"

namespace mok::ptx {

namespace matrix_detail {

constexpr uint32_t kRowBytes = 16;

/// 8x8 elements of 16 bits.
using Matrix = uint16_t[8][8];

/// Element `half` of lane `lane`'s register: its row and column.
inline uint16_t& element(Matrix& matrix, uint32_t lane, uint32_t half, bool transposed) {
    const uint32_t line = lane / 4, at = 2 * (lane % 4) + half;
    return transposed ? matrix[at][line] : matrix[line][at];
}

inline void check_all_lanes(uint32_t present) {
    if (present != 0xffffffffu) {
        emu::fail(emu::ErrorKind::kDiverged, "is executed by a warp of which some lanes have exited");
    }
}

struct Load {
    uint32_t address;
    uint32_t* registers;
};

template <bool kTransposed>
void load(const emu::Lanes<Load>& lanes, uint64_t (&)[emu::kLanes]) {
    check_all_lanes(lanes.present);
    Matrix matrices[4];
    for (uint32_t lane = 0; lane < emu::kLanes; ++lane) {
        const uint8_t* row = emu::shared_access_of_lane(lane, lanes[lane].address, kRowBytes, emu::kRead);
        std::memcpy(matrices[lane / 8][lane % 8], row, kRowBytes);
    }
    for (uint32_t lane = 0; lane < emu::kLanes; ++lane) {
        for (uint32_t i = 0; i < 4; ++i) {
            lanes[lane].registers[i] = element(matrices[i], lane, 0, kTransposed) |
                                       uint32_t{element(matrices[i], lane, 1, kTransposed)} << 16;
        }
    }
}

struct Store {
    uint32_t address;
    uint32_t registers[4];
};

template <bool kTransposed>
void store(const emu::Lanes<Store>& lanes) {
    check_all_lanes(lanes.present);
    Matrix matrices[4];
    for (uint32_t lane = 0; lane < emu::kLanes; ++lane) {
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t value = lanes[lane].registers[i];
            element(matrices[i], lane, 0, kTransposed) = static_cast<uint16_t>(value);
            element(matrices[i], lane, 1, kTransposed) = static_cast<uint16_t>(value >> 16);
        }
    }
    for (uint32_t lane = 0; lane < emu::kLanes; ++lane) {
        uint8_t* row = emu::shared_access_of_lane(lane, lanes[lane].address, kRowBytes, emu::kWrite);
        std::memcpy(row, matrices[lane / 8][lane % 8], kRowBytes);
    }
}

inline Store store_operands(uint32_t address, const uint32_t (&matrices)[4]) {
    return {address, {matrices[0], matrices[1], matrices[2], matrices[3]}};
}

}  // namespace matrix_detail

/// ldmatrix.x4.
MOK_DEVICE void load_matrix_x4(uint32_t address, uint32_t (&matrices)[4], Site site = Site::current()) {
    using namespace matrix_detail;
    emu::exchange<Load, load<false>>("load_matrix_x4", {address, matrices}, site);
}

/// ldmatrix.x4.trans.
MOK_DEVICE void load_matrix_x4_transposed(uint32_t address, uint32_t (&matrices)[4],
                                          Site site = Site::current()) {
    using namespace matrix_detail;
    emu::exchange<Load, load<true>>("load_matrix_x4_transposed", {address, matrices}, site);
}

/// stmatrix.x4.
MOK_DEVICE void store_matrix_x4(uint32_t address, const uint32_t (&matrices)[4],
                                Site site = Site::current()) {
    using namespace matrix_detail;
    emu::deposit<Store, store<false>>("store_matrix_x4", store_operands(address, matrices), site);
}

/// stmatrix.x4.trans.
MOK_DEVICE void store_matrix_x4_transposed(uint32_t address, const uint32_t (&matrices)[4],
                                           Site site = Site::current()) {
    using namespace matrix_detail;
    emu::deposit<Store, store<true>>("store_matrix_x4_transposed", store_operands(address, matrices), site);
}

}  // namespace mok::ptx
