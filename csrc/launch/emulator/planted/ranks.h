// Two ranks: each writes 32 words to its peer's window, raises a flag there, waits for its own flag, copies
// what came to `out`, and tells the peer that it is done. One warp each.
#pragma once

#include "csrc/launch/emulator/planted/bugs.h"

namespace mok::planted {

namespace ranks {

constexpr uint32_t kReady = 0, kDone = 1, kBegun = 2;  // flags
constexpr uint32_t kHello = 512;                       // floats

enum Place : uint32_t { kReadyPlace = 5 };

}  // namespace ranks

__global__ void ranks_kernel(const __grid_constant__ Params p) {
    using namespace ranks;
    const uint32_t lane = ptx::lane_idx();
    ptx::Deadline deadline(p.limits, kReadyPlace);
    deadline.peer = 1 - p.rank;
    if (p.has(Bug::kTraps) && p.rank == 1) ptx::trap();
    if (p.has(Bug::kTrapsAtOnce) && p.rank == 1 && lane == 0) {
        ptx::st_release_sys(p.peer_flags + kBegun, 1u);
        ptx::trap();
    }
    if (p.has(Bug::kTouchesPrivate) && p.rank == 1) ptx::ld_relaxed_sys(p.peer_words);
    // The peer's host has prepared its window before its kernel begins.
    if (lane == 0) ptx::st_release_sys(p.peer_flags + kBegun, 1u);
    if (!p.has(Bug::kReadsPeerTooEarly)) {
        if (lane == 0) ptx::wait_reached_acquire_sys(p.flags + kBegun, 1, deadline);
        if (ptx::any_lane(deadline.expired)) ptx::trap_recorded(p.limits);
        ptx::sync_warp();
    }
    const float hello = ptx::load_global(p.peer_window + kHello + lane);
    ptx::store_global(p.peer_window + lane, hello + static_cast<float>(p.rank));
    ptx::sync_warp();
    if (lane == 0 && !(p.has(Bug::kWaitsForNothing) && p.rank == 0)) {
        if (p.has(Bug::kReleasesAtGpuScope)) {
            ptx::st_release_gpu(p.peer_flags + kReady, 1u);
        } else if (p.has(Bug::kRelaxedStore)) {
            ptx::st_relaxed_sys(p.peer_flags + kReady, 1u);
        } else if (p.has(Bug::kPlainFlag)) {
            ptx::store_global(p.peer_flags + kReady, 1u);
        } else {
            ptx::st_release_sys(p.peer_flags + kReady, 1u);
        }
    }
    if (lane == 0 && !p.has(Bug::kNoFlag)) {
        const uint32_t* ready = p.flags + kReady;
        if (p.has(Bug::kAcquiresAtGpuScope)) {
            ptx::wait_reached_acquire_gpu(ready, 1, deadline);
        } else if (p.has(Bug::kRelaxedLoad)) {
            ptx::wait_until(deadline, 1, [&](uint64_t& seen) {
                seen = ptx::ld_relaxed_sys(ready);
                return seen == 1;
            });
        } else {
            ptx::wait_reached_acquire_sys(ready, 1, deadline);
        }
    }
    if (ptx::any_lane(deadline.expired)) ptx::trap_recorded(p.limits);
    ptx::sync_warp();
    ptx::store_global(p.out + lane, ptx::load_global(p.window + lane));
    // What the host reads next is what the peer writes: not before it has said that it is done.
    ptx::store_global(p.peer_window + 64 + lane, static_cast<float>(lane));
    ptx::sync_warp();
    if (lane == 0) {
        ptx::st_release_sys(p.peer_flags + kDone, 1u);
        if (p.has(Bug::kEndsBeforePeer)) return;
        if (!ptx::wait_reached_acquire_sys(p.flags + kDone, 1, deadline)) ptx::trap_recorded(p.limits);
    }
}

}  // namespace mok::planted
