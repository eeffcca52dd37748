// Bounded waiting. Every wait of a kernel is a wrapper with its loop inside; the loop ends when the condition
// holds, when the wait's time is up, or when any other wait has ended first. A kernel looks at `expired` and
// leaves its loops; a thread whose own time was up traps at the end.
#pragma once

#include "csrc/ptx/device/fence.cuh"
#include "csrc/ptx/device/flag.cuh"
#include "csrc/ptx/device/special.cuh"
#include "csrc/ptx/wait_record.h"

namespace mok::ptx {

/// One thread's view of the kernel's time limits.
struct Deadline {
    const WaitLimits& limits;
    uint32_t place = 0;      // goes into the record: set it to the kernel's enum before waiting
    int32_t peer = -1;       // the same
    bool expired = false;    // a wait gave up
    bool timed_out = false;  // because its own time was up, not because others had ended

    MOK_DEVICE explicit Deadline(const WaitLimits& limits_in, uint32_t place_in = 0)
        : limits(limits_in), place(place_in) {}

    /// The slow path of a wait that began at `begin`: whether to give up.
    MOK_DEVICE bool give_up(uint64_t begin, uint64_t expected, uint64_t seen) {
        if (ld_relaxed_gpu(limits.expired) != 0) {
            expired = true;
            return true;
        }
        return is_time_up(begin, expected, seen);
    }

    /// The same of a wait that others' ends do not end.
    MOK_DEVICE bool is_time_up(uint64_t begin, uint64_t expected, uint64_t seen) {
        const uint64_t waited = timer_ns() - begin;
        if (waited <= limits.limit_ns) return false;
        expired = timed_out = true;
        if (atom_relaxed_gpu_exchange(limits.expired, 1u) == 0) {
            WaitRecord* record = limits.record;
            st_relaxed_sys(&record->place, place);
            st_relaxed_sys(reinterpret_cast<uint32_t*>(&record->rank), static_cast<uint32_t>(limits.rank));
            st_relaxed_sys(reinterpret_cast<uint32_t*>(&record->peer), static_cast<uint32_t>(peer));
            st_relaxed_sys(&record->block, block_idx());
            st_relaxed_sys(&record->thread, thread_idx());
            st_relaxed_sys(&record->expected, expected);
            st_relaxed_sys(&record->seen, seen);
            st_relaxed_sys(&record->waited_ns, waited);
            st_release_sys(&record->complete, 1u);
        }
        return true;
    }
};

/// Traps once the record of a wait whose time was up has arrived, whichever thread has written it: the trap
/// may end the context, and with it stores that are on their way to the host. A workspace that was told to
/// end has no record (sm_70).
MOK_DEVICE void trap_recorded(const WaitLimits& limits) {
    constexpr uint32_t kPolls = 1000;  // a record is written in microseconds, and each poll takes about one
    fence_acq_rel_sys();
    for (uint32_t poll = 0; poll < kPolls; ++poll) {
        if (ld_acquire_sys(&limits.record->complete) != 0) break;
    }
    trap();
}

/// Polls `test(seen)` until it is true; false when the time is up. `seen` is what the test read last.
template <typename Test>
MOK_DEVICE bool wait_until(Deadline& deadline, uint64_t expected, const Test& test) {
    constexpr uint32_t kPollsPerCheck = 64;  // the limit is looked at rarely: its word lies in L2
    uint64_t seen = 0;
    if (test(seen)) return true;
    if (deadline.expired) return false;
    const uint64_t begin = timer_ns();
    for (uint32_t poll = 1;; ++poll) {
        if (test(seen)) return true;
        if (poll % kPollsPerCheck == 0 && deadline.give_up(begin, expected, seen)) return false;
    }
}

// A counter has reached `target` when it is at most half its range ahead: epochs may wrap around.

/// Spins on ld.acquire.gpu until *flag >= target (sm_70).
MOK_DEVICE bool wait_reached_acquire_gpu(const uint32_t* flag, uint32_t target, Deadline& deadline) {
    return wait_until(deadline, target, [&](uint64_t& seen) {
        const uint32_t value = ld_acquire_gpu(flag);
        seen = value;
        return static_cast<int32_t>(value - target) >= 0;
    });
}

/// Spins on ld.acquire.sys until *flag >= target: the writer is another GPU or process (sm_70).
MOK_DEVICE bool wait_reached_acquire_sys(const uint32_t* flag, uint32_t target, Deadline& deadline) {
    return wait_until(deadline, target, [&](uint64_t& seen) {
        const uint32_t value = ld_acquire_sys(flag);
        seen = value;
        return static_cast<int32_t>(value - target) >= 0;
    });
}

/// The same for 64-bit epochs (sm_70).
MOK_DEVICE bool wait_reached_acquire_sys(const uint64_t* flag, uint64_t target, Deadline& deadline) {
    return wait_until(deadline, target, [&](uint64_t& seen) {
        seen = ld_acquire_sys(flag);
        return static_cast<int64_t>(seen - target) >= 0;
    });
}

/// Spins on ld.acquire.gpu until a bit of `mask` in *flag differs from `before`: a barrier that flips a bit
/// instead of counting epochs (sm_70).
MOK_DEVICE bool wait_changed_acquire_gpu(const uint32_t* flag, uint32_t before, uint32_t mask,
                                         Deadline& deadline) {
    return wait_until(deadline, before ^ mask, [&](uint64_t& seen) {
        const uint32_t value = ld_acquire_gpu(flag);
        seen = value;
        return ((value ^ before) & mask) != 0;
    });
}

}  // namespace mok::ptx
