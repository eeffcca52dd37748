// Moving registers between the warpgroups of a block. All warps of a warpgroup call it; the kernel states its
// launch register count by __launch_bounds__. What is given out may not exceed what was launched, or it
// hangs.
#pragma once

#include "csrc/ptx/device/base.cuh"

namespace mok::ptx {

/// setmaxnreg.dec: keeps kRegisters a thread, releases the others (sm_90a).
template <int kRegisters>
MOK_DEVICE void registers_decrease() {
    static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

/// setmaxnreg.inc: waits until kRegisters a thread are there (sm_90a).
template <int kRegisters>
MOK_DEVICE void registers_increase() {
    static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace mok::ptx
