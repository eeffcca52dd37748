// csrc/ptx/device/deadline.cuh on the emulated machine: a wait sleeps until what it waits for may have
// changed. Its limit counts only where a test asks for time-outs, once nothing else can move.
#pragma once

#include "csrc/ptx/host/fence.h"
#include "csrc/ptx/host/flag.h"
#include "csrc/ptx/host/special.h"
#include "csrc/ptx/wait_record.h"

namespace mok::ptx {

/// One thread's view of the kernel's time limits.
struct Deadline {
    const WaitLimits& limits;
    uint32_t place = 0;
    int32_t peer = -1;
    bool expired = false;
    bool timed_out = false;

    MOK_DEVICE explicit Deadline(const WaitLimits& limits_in, uint32_t place_in = 0)
        : limits(limits_in), place(place_in) {}

    /// Whether another wait of the kernel has given up.
    bool have_others_expired() {
        expired = expired || ld_relaxed_gpu(limits.expired) != 0;
        return expired;
    }

    /// The slow path of a wait that began at `begin`: whether to give up.
    bool give_up(uint64_t begin, uint64_t expected, uint64_t seen) {
        if (have_others_expired()) return true;
        return is_time_up(begin, expected, seen);
    }

    /// The same of a wait that others' ends do not end.
    bool is_time_up(uint64_t begin, uint64_t expected, uint64_t seen) {
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

    /// After a sleep: whether to give up.
    bool ends_wait(emu::Wake wake, uint64_t begin, uint64_t expected, uint64_t seen) {
        if (wake == emu::Wake::kProgress) return false;
        return wake == emu::Wake::kTimeUp ? give_up(begin, expected, seen) : have_others_expired();
    }

    /// When the time of a wait that begins now is up.
    uint64_t end_ns(uint64_t begin) const {
        const uint64_t end = begin + limits.limit_ns + 1;
        return end > begin ? end : ~uint64_t{0};
    }
};

/// Traps once the record of a wait whose time was up has arrived.
MOK_DEVICE void trap_recorded(const WaitLimits& limits, Site site = Site::current()) {
    constexpr uint32_t kPolls = 1000;
    fence_acq_rel_sys(site);
    for (uint32_t poll = 0; poll < kPolls; ++poll) {
        if (ld_acquire_sys(&limits.record->complete, site) != 0) break;
    }
    trap(site);
}

namespace deadline_detail {

/// Sleeps until `test(seen)` is true; false when the wait gives up.
template <typename Test>
bool wait_until(Deadline& deadline, uint64_t expected, const Test& test) {
    uint64_t seen = 0;
    const uint64_t begin = timer_ns();
    for (;;) {
        emu::begin_poll();
        const bool done = test(seen);
        emu::end_poll();
        if (done) return true;
        if (deadline.expired) return false;
        const emu::Wake wake = emu::poll_sleep(expected, seen, deadline.end_ns(begin));
        if (deadline.ends_wait(wake, begin, expected, seen)) return false;
    }
}

}  // namespace deadline_detail

/// Polls `test(seen)` until it is true; false when the time is up.
template <typename Test>
MOK_DEVICE bool wait_until(Deadline& deadline, uint64_t expected, const Test& test,
                           Site site = Site::current()) {
    if (emu::is_left_out("wait_until", site)) return true;
    emu::begin_wait("wait_until", site);
    return deadline_detail::wait_until(deadline, expected, test);
}

#define MOK_WAIT_REACHED(SCOPE, T, SIGNED)                                                    \
    MOK_DEVICE bool wait_reached_acquire_##SCOPE(const T* flag, T target, Deadline& deadline, \
                                                 Site site = Site::current()) {               \
        if (emu::is_left_out("wait_reached_acquire_" #SCOPE, site)) return true;              \
        emu::begin_wait("wait_reached_acquire_" #SCOPE, site);                                \
        return deadline_detail::wait_until(deadline, target, [&](uint64_t& seen) {            \
            const T value = ld_acquire_##SCOPE(flag, site);                                   \
            seen = value;                                                                     \
            return static_cast<SIGNED>(value - target) >= 0;                                  \
        });                                                                                   \
    }

MOK_WAIT_REACHED(gpu, uint32_t, int32_t)
MOK_WAIT_REACHED(sys, uint32_t, int32_t)
MOK_WAIT_REACHED(sys, uint64_t, int64_t)

#undef MOK_WAIT_REACHED

/// Until a bit of `mask` in *flag differs from `before`.
MOK_DEVICE bool wait_changed_acquire_gpu(const uint32_t* flag, uint32_t before, uint32_t mask,
                                         Deadline& deadline, Site site = Site::current()) {
    if (emu::is_left_out("wait_changed_acquire_gpu", site)) return true;
    emu::begin_wait("wait_changed_acquire_gpu", site);
    return deadline_detail::wait_until(deadline, before ^ mask, [&](uint64_t& seen) {
        const uint32_t value = ld_acquire_gpu(flag, site);
        seen = value;
        return ((value ^ before) & mask) != 0;
    });
}

}  // namespace mok::ptx
