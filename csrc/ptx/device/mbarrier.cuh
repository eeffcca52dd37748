// mbarriers: 8 bytes of shared memory that complete a phase when all arrivals and all expected bytes are
// there.
//
// A fresh barrier is in phase 0; waiting for parity p returns when the phase of that parity is complete. So a
// consumer of a ring of stages waits with parity (round & 1), its producer, for an empty stage, with the
// opposite, which is true at once in round 0. A waiter may lag by one phase only: everyone sees every phase.
#pragma once

#include "csrc/ptx/device/cluster.cuh"
#include "csrc/ptx/device/deadline.cuh"
#include "csrc/ptx/device/warp.cuh"

namespace mok::ptx {

/// mbarrier.init: `arrivals` complete a phase; then fence_mbarrier_init_release_cluster and a block or
/// cluster barrier before anyone uses it (sm_80).
MOK_DEVICE void mbar_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

/// mbarrier.inval: needed before its memory serves another purpose (sm_80).
MOK_DEVICE void mbar_invalidate(uint32_t barrier) {
    asm volatile("mbarrier.inval.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

/// mbarrier.arrive, a release at block scope (sm_80).
MOK_DEVICE void mbar_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/// mbarrier.arrive.expect_tx: arrives, and the phase also waits for `bytes` of copies (sm_90).
MOK_DEVICE void mbar_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/// mbarrier.expect_tx without an arrival, for bytes known before the arrival that closes the phase (sm_90).
MOK_DEVICE void mbar_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/// mbarrier.arrive on a cluster_address. Its default semantics order this thread's reads (as a freed stage
/// needs); ordinary data written for the other block goes with mbar_arrive_cluster_release (sm_90).
MOK_DEVICE void mbar_arrive_cluster(uint32_t mapped_barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped_barrier) : "memory");
}

/// mbarrier.arrive.release.cluster: also what this thread wrote to shared memory of the cluster; a memory
/// barrier's cost, so not for every stage (sm_90).
MOK_DEVICE void mbar_arrive_cluster_release(uint32_t mapped_barrier) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapped_barrier)
                 : "memory");
}

/// mbarrier.arrive.expect_tx on a cluster_address (sm_90).
MOK_DEVICE void mbar_arrive_expect_cluster(uint32_t mapped_barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(mapped_barrier),
                 "r"(bytes)
                 : "memory");
}

/// mbarrier.test_wait: whether the phase of this parity is complete, an acquire at block scope if so (sm_80).
MOK_DEVICE bool mbar_test(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

/// mbarrier.try_wait: mbar_test that may suspend the thread for a while first (sm_90).
MOK_DEVICE bool mbar_try(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

/// mbarrier.try_wait.acquire.cluster: sees what other blocks of the cluster released (sm_90).
MOK_DEVICE bool mbar_try_acquire_cluster(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

/// Waits for the phase of this parity; false when the time is up (sm_90).
MOK_DEVICE bool mbar_wait(uint32_t barrier, uint32_t parity, Deadline& deadline) {
    return wait_until(deadline, parity, [&](uint64_t&) { return mbar_try(barrier, parity); });
}

/// The same, seeing ordinary stores that other blocks of the cluster released (sm_90).
MOK_DEVICE bool mbar_wait_acquire_cluster(uint32_t barrier, uint32_t parity, Deadline& deadline) {
    return wait_until(deadline, parity, [&](uint64_t&) { return mbar_try_acquire_cluster(barrier, parity); });
}

/// Waits for the phases of this parity of two barriers; false when the time is up (sm_90).
MOK_DEVICE bool mbar_wait_both(uint32_t barrier_0, uint32_t barrier_1, uint32_t parity, Deadline& deadline) {
    return wait_until(deadline, parity,
                      [&](uint64_t&) { return mbar_try(barrier_0, parity) && mbar_try(barrier_1, parity); });
}

/// Waits for a phase that copies complete by themselves, whether or not the kernel's other waits have ended:
/// who has loaded into the block's memory stays until the load has landed. Traps when the time is up, because
/// the memory is the next block's once this one has left (sm_90).
MOK_DEVICE void mbar_wait_landed(uint32_t barrier, uint32_t parity, Deadline& deadline) {
    const uint64_t begin = timer_ns();
    while (!mbar_try(barrier, parity)) {
        if (deadline.is_time_up(begin, parity, 0)) trap_recorded(deadline.limits);
    }
}

/// A whole warp waits for either of two phases: bit 0 for the first barrier, bit 1 for the second, set where
/// all lanes have seen it; 0 when the time is up (sm_80).
MOK_DEVICE uint32_t mbar_wait_any(uint32_t barrier_0, uint32_t parity_0, uint32_t barrier_1,
                                  uint32_t parity_1, Deadline& deadline) {
    constexpr uint32_t kPollsPerCheck = 64;
    const uint64_t begin = timer_ns();
    for (uint32_t poll = 1;; ++poll) {
        const uint32_t done = (all_lanes(mbar_test(barrier_0, parity_0)) ? 1u : 0u) |
                              (all_lanes(mbar_test(barrier_1, parity_1)) ? 2u : 0u);
        if (done != 0) return done;
        // All lanes give up together, or the others would wait for them in a vote.
        bool expired = deadline.expired;
        if (poll % kPollsPerCheck == 0) expired |= deadline.give_up(begin, parity_0 | parity_1 << 1, 0);
        if (any_lane(expired)) {
            deadline.expired = true;
            return 0;
        }
    }
}

}  // namespace mok::ptx
