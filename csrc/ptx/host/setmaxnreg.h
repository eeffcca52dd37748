// csrc/ptx/device/setmaxnreg.cuh on the emulated machine, which keeps the block's budget of registers.
#pragma once

#include "csrc/ptx/host/base.h"

namespace mok::ptx {

/// setmaxnreg.dec.
template <int kRegisters>
MOK_DEVICE void registers_decrease(Site site = Site::current()) {
    static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
    emu::set_registers(kRegisters, false, site);
}

/// setmaxnreg.inc.
template <int kRegisters>
MOK_DEVICE void registers_increase(Site site = Site::current()) {
    static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
    emu::set_registers(kRegisters, true, site);
}

}  // namespace mok::ptx
