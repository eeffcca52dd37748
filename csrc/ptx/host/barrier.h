// csrc/ptx/device/barrier.cuh on the emulated machine.
#pragma once

#include "csrc/ptx/host/base.h"

namespace mok::ptx {

/// bar.sync 0.
MOK_DEVICE void sync_block(Site site = Site::current()) {
    if (emu::is_left_out("sync_block", site)) return;
    emu::sync_block("sync_block", false, site);
}

/// bar.red.or.
MOK_DEVICE bool sync_block_or(bool condition, Site site = Site::current()) {
    if (emu::is_left_out("sync_block_or", site)) return condition;
    return emu::sync_block("sync_block_or", condition, site);
}

/// bar.sync.
MOK_DEVICE void named_barrier_sync(uint32_t id, uint32_t threads, Site site = Site::current()) {
    if (emu::is_left_out("named_barrier_sync", site)) return;
    emu::named_barrier("named_barrier_sync", id, threads, true, site);
}

/// bar.arrive.
MOK_DEVICE void named_barrier_arrive(uint32_t id, uint32_t threads, Site site = Site::current()) {
    if (emu::is_left_out("named_barrier_arrive", site)) return;
    emu::named_barrier("named_barrier_arrive", id, threads, false, site);
}

}  // namespace mok::ptx
