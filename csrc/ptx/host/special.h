// csrc/ptx/device/special.cuh on the emulated machine.
#pragma once

#include "csrc/ptx/host/base.h"

namespace mok::ptx {

/// %tid.x.
MOK_DEVICE uint32_t thread_idx() {
    return emu::thread_idx();
}

/// %ntid.x.
MOK_DEVICE uint32_t block_threads() {
    return emu::block_threads();
}

/// %ctaid.x.
MOK_DEVICE uint32_t block_idx() {
    return emu::block_idx();
}

/// %nctaid.x.
MOK_DEVICE uint32_t num_blocks() {
    return emu::num_blocks();
}

/// %laneid.
MOK_DEVICE uint32_t lane_idx() {
    return emu::lane_idx();
}

/// The warp's index; a shuffle on the device, so all lanes come.
MOK_DEVICE uint32_t warp_idx(Site site = Site::current()) {
    emu::meet_later("warp_idx", site);
    return emu::warp_idx();
}

/// %lanemask_lt.
MOK_DEVICE uint32_t lanes_before() {
    return (1u << emu::lane_idx()) - 1;
}

/// %globaltimer: virtual time.
MOK_DEVICE uint64_t timer_ns() {
    return emu::timer_ns();
}

/// %clock64: of the virtual time too.
MOK_DEVICE uint64_t clock_cycles() {
    return emu::timer_ns();
}

/// nanosleep.
MOK_DEVICE void sleep_ns(uint32_t, Site site = Site::current()) {
    emu::enter("sleep_ns", site);
    emu::sleep();
}

/// trap: ends the rank's kernel.
MOK_DEVICE void trap(Site site = Site::current()) {
    emu::enter("trap", site);
    emu::trap();
}

}  // namespace mok::ptx
