// csrc/ptx/device/mbarrier.cuh on the emulated machine.
#pragma once

#include "csrc/ptx/host/cluster.h"
#include "csrc/ptx/host/deadline.h"
#include "csrc/ptx/host/warp.h"

namespace mok::ptx {

namespace mbarrier_detail {

inline void arrive(const char* wrapper, uint32_t barrier, uint32_t arrivals, uint32_t bytes,
                   emu::ArriveOrder order, Site site) {
    if (emu::is_left_out(wrapper, site)) return;
    emu::enter(wrapper, site);
    emu::mbarrier_arrive(barrier, arrivals, bytes, order);
}

inline bool test(const char* wrapper, uint32_t barrier, uint32_t parity, emu::Scope scope, Site site) {
    emu::enter(wrapper, site);
    return emu::mbarrier_test(barrier, parity, scope);
}

inline bool wait(const char* wrapper, uint32_t barrier, uint32_t parity, emu::Scope scope, Deadline& deadline,
                 Site site) {
    if (emu::is_left_out(wrapper, site)) return true;
    emu::begin_wait(wrapper, site);
    const uint64_t begin = timer_ns();
    for (;;) {
        if (emu::mbarrier_test(barrier, parity, scope)) return true;
        if (deadline.expired) return false;
        const emu::Wake wake = emu::mbarrier_sleep(barrier, parity, deadline.end_ns(begin));
        if (deadline.ends_wait(wake, begin, parity, 0)) return false;
    }
}

}  // namespace mbarrier_detail

/// mbarrier.init.
MOK_DEVICE void mbar_init(uint32_t barrier, uint32_t arrivals, Site site = Site::current()) {
    emu::enter("mbar_init", site);
    emu::mbarrier_init(barrier, arrivals);
}

/// mbarrier.inval.
MOK_DEVICE void mbar_invalidate(uint32_t barrier, Site site = Site::current()) {
    emu::enter("mbar_invalidate", site);
    emu::mbarrier_invalidate(barrier);
}

/// mbarrier.arrive.
MOK_DEVICE void mbar_arrive(uint32_t barrier, Site site = Site::current()) {
    mbarrier_detail::arrive("mbar_arrive", barrier, 1, 0, emu::ArriveOrder::kBlock, site);
}

/// mbarrier.arrive.expect_tx.
MOK_DEVICE void mbar_arrive_expect(uint32_t barrier, uint32_t bytes, Site site = Site::current()) {
    mbarrier_detail::arrive("mbar_arrive_expect", barrier, 1, bytes, emu::ArriveOrder::kBlock, site);
}

/// mbarrier.expect_tx.
MOK_DEVICE void mbar_expect(uint32_t barrier, uint32_t bytes, Site site = Site::current()) {
    mbarrier_detail::arrive("mbar_expect", barrier, 0, bytes, emu::ArriveOrder::kNothing, site);
}

/// mbarrier.arrive on a cluster_address.
MOK_DEVICE void mbar_arrive_cluster(uint32_t mapped_barrier, Site site = Site::current()) {
    mbarrier_detail::arrive("mbar_arrive_cluster", mapped_barrier, 1, 0, emu::ArriveOrder::kBlock, site);
}

/// mbarrier.arrive.release.cluster.
MOK_DEVICE void mbar_arrive_cluster_release(uint32_t mapped_barrier, Site site = Site::current()) {
    mbarrier_detail::arrive("mbar_arrive_cluster_release", mapped_barrier, 1, 0, emu::ArriveOrder::kCluster,
                            site);
}

/// mbarrier.arrive.expect_tx on a cluster_address.
MOK_DEVICE void mbar_arrive_expect_cluster(uint32_t mapped_barrier, uint32_t bytes,
                                           Site site = Site::current()) {
    mbarrier_detail::arrive("mbar_arrive_expect_cluster", mapped_barrier, 1, bytes, emu::ArriveOrder::kBlock,
                            site);
}

/// mbarrier.test_wait.
MOK_DEVICE bool mbar_test(uint32_t barrier, uint32_t parity, Site site = Site::current()) {
    return mbarrier_detail::test("mbar_test", barrier, parity, emu::Scope::kBlock, site);
}

/// mbarrier.try_wait.
MOK_DEVICE bool mbar_try(uint32_t barrier, uint32_t parity, Site site = Site::current()) {
    return mbarrier_detail::test("mbar_try", barrier, parity, emu::Scope::kBlock, site);
}

/// mbarrier.try_wait.acquire.cluster.
MOK_DEVICE bool mbar_try_acquire_cluster(uint32_t barrier, uint32_t parity, Site site = Site::current()) {
    return mbarrier_detail::test("mbar_try_acquire_cluster", barrier, parity, emu::Scope::kCluster, site);
}

/// Waits for the phase of this parity; false when the time is up.
MOK_DEVICE bool mbar_wait(uint32_t barrier, uint32_t parity, Deadline& deadline,
                          Site site = Site::current()) {
    return mbarrier_detail::wait("mbar_wait", barrier, parity, emu::Scope::kBlock, deadline, site);
}

/// The same, seeing ordinary stores that other blocks of the cluster released.
MOK_DEVICE bool mbar_wait_acquire_cluster(uint32_t barrier, uint32_t parity, Deadline& deadline,
                                          Site site = Site::current()) {
    return mbarrier_detail::wait("mbar_wait_acquire_cluster", barrier, parity, emu::Scope::kCluster, deadline,
                                 site);
}

/// Waits for the phases of this parity of two barriers; false when the time is up.
MOK_DEVICE bool mbar_wait_both(uint32_t barrier_0, uint32_t barrier_1, uint32_t parity, Deadline& deadline,
                               Site site = Site::current()) {
    if (emu::is_left_out("mbar_wait_both", site)) return true;
    return mbarrier_detail::wait("mbar_wait_both", barrier_0, parity, emu::Scope::kBlock, deadline, site) &&
           mbarrier_detail::wait("mbar_wait_both", barrier_1, parity, emu::Scope::kBlock, deadline, site);
}

/// Waits for a phase that copies complete by themselves, whether or not other waits have ended.
MOK_DEVICE void mbar_wait_landed(uint32_t barrier, uint32_t parity, Deadline& deadline,
                                 Site site = Site::current()) {
    if (emu::is_left_out("mbar_wait_landed", site)) return;
    emu::begin_wait("mbar_wait_landed", site);
    const uint64_t begin = timer_ns();
    while (!emu::mbarrier_test(barrier, parity, emu::Scope::kBlock)) {
        const emu::Wake wake = emu::mbarrier_sleep(barrier, parity, deadline.end_ns(begin));
        if (wake == emu::Wake::kTimeUp && deadline.is_time_up(begin, parity, 0)) {
            trap_recorded(deadline.limits);
        }
    }
}

/// A whole warp waits for either of two phases; 0 when the time is up.
MOK_DEVICE uint32_t mbar_wait_any(uint32_t barrier_0, uint32_t parity_0, uint32_t barrier_1,
                                  uint32_t parity_1, Deadline& deadline, Site site = Site::current()) {
    if (emu::is_left_out("mbar_wait_any", site)) return 3;
    const emu::MbarrierPair pair{{barrier_0, barrier_1}, {parity_0, parity_1}};
    if (emu::lead_warp("mbar_wait_any", pair, site)) {
        emu::begin_wait("mbar_wait_any", site);
        const uint64_t begin = timer_ns(), expected = parity_0 | parity_1 << 1;
        uint32_t done = 0;
        bool gives_up = false;
        while (done == 0 && !gives_up) {
            emu::begin_poll();
            done = (emu::mbarrier_test_for_warp(barrier_0, parity_0) ? 1u : 0u) |
                   (emu::mbarrier_test_for_warp(barrier_1, parity_1) ? 2u : 0u);
            emu::end_poll();
            if (done != 0) break;
            gives_up = deadline.expired;
            if (gives_up) break;
            const emu::Wake wake = emu::poll_sleep(expected, 0, deadline.end_ns(begin));
            gives_up = deadline.ends_wait(wake, begin, expected, 0);
        }
        emu::dismiss_warp(done);
    }
    const uint32_t done = static_cast<uint32_t>(emu::warp_result());
    deadline.expired |= done == 0;
    return done;
}

}  // namespace mok::ptx
