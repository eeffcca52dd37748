// Division by a number that the host knows and the device does not: a product and a shift.
#pragma once

#include <cstdint>

#include "csrc/layout/types.h"

namespace mok {

/// For numerators below 2^31.
struct Divisor {
    uint32_t divisor;
    uint32_t multiplier;
    uint32_t shift;

    MOK_HD uint32_t divide(uint32_t value) const {
        return static_cast<uint32_t>(static_cast<uint64_t>(value) * multiplier >> shift);
    }
    MOK_HD uint32_t divide_up(uint32_t value) const { return divide(value + divisor - 1); }
    MOK_HD uint32_t round_down(uint32_t value) const { return divide(value) * divisor; }
    MOK_HD uint32_t remainder(uint32_t value) const { return value - round_down(value); }
};

/// `divisor` in [1, 2^31]. With 2^s >= divisor and m = 2^(31 + s) / divisor + 1, m is below 2^32 and too
/// large by at most 1, which costs value x m less than 2^(31 + s) / divisor.
inline Divisor make_divisor(uint32_t divisor) {
    uint32_t bits = 0;
    while ((uint64_t{1} << bits) < divisor) ++bits;
    const uint64_t multiplier = (uint64_t{1} << (31 + bits)) / divisor + 1;
    return Divisor{divisor, static_cast<uint32_t>(multiplier), 31 + bits};
}

}  // namespace mok
