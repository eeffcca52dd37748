// A barrier among the ranks of a group, in one block of each rank's kernel, and the end of a workspace.
//
// Barriers are numbered by an epoch in the rank's own device memory, so graph replays count on by themselves.
// Rank s arrives at epoch e by storing e in its slot of every peer's control block; rank r passes when all
// slots of its own block have reached e. Slots have one writer and only grow.
//
// Order. What earlier kernels of the stream wrote, to any rank's memory, happens before this kernel, so a
// release of system scope by any of its threads covers it (other threads of the same kernel meet first, by
// sync_block or a grid barrier). Thread p serves peer p alone: it releases to p's slot and acquires from its
// own, both at system scope; then the block meets. So all threads after the barrier, and later kernels of the
// stream, see everything (TMA in the same kernel needs fence_proxy_async_global besides). A rank stores e + 1
// only after all it did before in stream order: what is read between two barriers may be overwritten after
// the second.
//
// Ends. A workspace on a GPU ends once and for good: `expired` is set, and every wait and later barrier of
// the rank returns at once without arriving. (a) A rank that raises runs peer_end: it writes the reason into
// its fatal record at every peer, `kind` last. Who waits for an epoch that this rank will not reach looks at
// the kind now and then, reads the epoch once more (an arrival before the end counts), copies the record to
// host memory and leaves: kEnded, nothing traps. So does who waits for a rank that another one has given up
// on (`told` says who wrote last). (b) A wait that is too long is kExpired: the epochs seen go to host
// memory, the fatal records at all peers name the missing ranks (one that was merely slow need not wait in
// vain), and the kernel traps at its end. What must outlive the context is performed by then: every thread
// fences at system scope, the block meets.
#pragma once

#include "csrc/comm/device/peer_window.cuh"
#include "csrc/layout/peer_record.h"
#include "csrc/ptx/ptx.h"

namespace mok {

enum class PeerOutcome : uint32_t {
    kPassed,
    kEnded,    // nothing that peers were to write may be used: leave
    kExpired,  // leave as well, and trap at the end of the kernel
};

namespace peer_detail {

inline constexpr uint32_t kPollsPerLook = 32;  // a peer's end may be noticed some microseconds late

MOK_DEVICE bool is_peer(const PeerGroup& group, uint32_t thread) {
    return thread < static_cast<uint32_t>(group.num_ranks) && thread != static_cast<uint32_t>(group.rank);
}

/// The fatal record of this rank at a peer: each peer's by one thread.
MOK_DEVICE void tell_peer(const PeerGroup& group, uint32_t peer, FatalKind kind, uint64_t epoch,
                          uint32_t phase, const uint32_t* blamed, uint64_t milliseconds,
                          const SharedText* reason) {
    FatalRecord* record = &control_slot(window_of(group, peer), group.rank)->fatal;
    ptx::st_relaxed_sys(&record->call, epoch);
    ptx::st_relaxed_sys(&record->barrier, uint64_t{phase});
    ptx::st_relaxed_sys(&record->milliseconds, milliseconds);
    for (int word = 0; word < kMaxGroupRanks / 64; ++word) {
        uint64_t ranks = 0;
        if (blamed != nullptr) {
            ranks = ptx::ld_relaxed_gpu(blamed + 2 * word);
            ranks |= uint64_t{ptx::ld_relaxed_gpu(blamed + 2 * word + 1)} << 32;
        }
        ptx::st_relaxed_sys(&record->blamed[word], ranks);
    }
    ptx::st_relaxed_sys(&record->reason.bytes, reason == nullptr ? uint64_t{0} : reason->bytes);
    for (int word = 0; reason != nullptr && word < kReasonBytes / 8; ++word) {
        ptx::st_relaxed_sys(&record->reason.words[word], reason->words[word]);
    }
    ptx::st_release_sys(&record->kind, static_cast<uint64_t>(kind));
    // Whoever waits there for somebody else may look at one word.
    ptx::st_release_sys(&control_head(window_of(group, peer))->device.told,
                        static_cast<uint32_t>(group.rank) + 1);
}

/// Whether a rank has told this one that `peer` did not come to it either; which one.
MOK_DEVICE bool is_blamed(const PeerGroup& group, uint32_t peer, uint32_t& teller) {
    const uint32_t told = ptx::ld_acquire_sys(&device_state(group)->told);
    if (told == 0) return false;
    teller = told - 1;
    const FatalRecord& fatal = control_slot(group.window, static_cast<int>(teller))->fatal;
    if (ptx::ld_relaxed_sys(&fatal.kind) != static_cast<uint64_t>(FatalKind::kTimeout)) return false;
    return (ptx::ld_relaxed_sys(&fatal.blamed[peer / 64]) >> (peer % 64) & 1) != 0;
}

MOK_DEVICE void put_head(PeerRecord* record, int32_t by, uint32_t phase, uint64_t epoch) {
    ptx::st_relaxed_sys(reinterpret_cast<uint32_t*>(&record->by), static_cast<uint32_t>(by));
    ptx::st_relaxed_sys(&record->phase, phase);
    ptx::st_relaxed_sys(&record->epoch, epoch);
}

/// One thread: what rank `peer` wrote into its slot here becomes this rank's record.
MOK_DEVICE void report_told(const PeerGroup& group, uint32_t peer, uint32_t phase, uint64_t epoch) {
    const auto* from = reinterpret_cast<const uint64_t*>(&control_slot(group.window, peer)->fatal);
    auto* to = reinterpret_cast<uint64_t*>(&group.record->told);
    for (uint32_t word = 0; word < sizeof(FatalRecord) / 8; ++word) {
        ptx::st_relaxed_sys(to + word, ptx::ld_relaxed_sys(from + word));
    }
    put_head(group.record, static_cast<int32_t>(peer), phase, epoch);
    ptx::st_release_sys(&group.record->complete, 1u);
}

/// The whole block, after this rank's own time was up: `epoch` was not reached by all.
MOK_DEVICE void report_expired(const PeerGroup& group, uint32_t phase, uint64_t epoch, uint64_t limit_ns) {
    const uint32_t thread = ptx::thread_idx();
    DeviceState* state = device_state(group);
    bool missing = false;
    if (is_peer(group, thread)) {
        const uint64_t seen = ptx::ld_acquire_sys(&control_slot(group.window, thread)->epoch);
        ptx::st_relaxed_sys(&group.record->seen[thread], seen);
        missing = static_cast<int64_t>(seen - epoch) < 0;
    }
    const uint32_t ranks = ptx::ballot(missing);
    const uint32_t warp = ptx::warp_idx();
    if (ptx::lane_idx() == 0 && warp < kMaxGroupRanks / 32) ptx::st_relaxed_gpu(&state->blamed[warp], ranks);
    ptx::fence_acq_rel_sys();
    ptx::sync_block();
    if (thread == 0) {
        put_head(group.record, group.rank, phase, epoch);
        ptx::st_release_sys(&group.record->complete, 1u);
    }
    if (is_peer(group, thread)) {
        tell_peer(group, thread, FatalKind::kTimeout, epoch, phase, state->blamed, limit_ns / 1000000,
                  nullptr);
    }
}

}  // namespace peer_detail

/// One thread: rank `peer` means another call than this one. Every rank sees that for itself, before anyone
/// has used anything, and ends: nothing is sent and nothing traps.
MOK_DEVICE void report_mismatch(const PeerGroup& group, uint32_t peer, const CallHeader& ours) {
    DeviceState* state = device_state(group);
    ptx::st_relaxed_gpu(&state->ended, 1u);
    ptx::fence_acq_rel_gpu();
    if (ptx::atom_relaxed_gpu_exchange(&state->expired, 1u) != 0) return;  // ended before, and reported
    PeerRecord* record = group.record;
    const auto* theirs = reinterpret_cast<const uint64_t*>(call_header(group, peer));
    const auto* own = reinterpret_cast<const uint64_t*>(&ours);
    for (uint32_t word = 0; word < kHeaderWords; ++word) {
        ptx::st_relaxed_sys(reinterpret_cast<uint64_t*>(&record->headers[0]) + word, own[word]);
        ptx::st_relaxed_sys(reinterpret_cast<uint64_t*>(&record->headers[1]) + word,
                            ptx::load_global(theirs + word));
    }
    ptx::st_relaxed_sys(&record->told.kind, static_cast<uint64_t>(FatalKind::kMismatch));
    peer_detail::put_head(record, static_cast<int32_t>(peer), static_cast<uint32_t>(PeerPhase::kInputs),
                          ptx::ld_relaxed_gpu(&state->epoch));
    ptx::st_release_sys(&record->complete, 1u);
}

/// All threads of one block call it, at least num_ranks and whole warps; all get the same outcome.
MOK_DEVICE PeerOutcome peer_barrier(const PeerGroup& group, PeerPhase phase_in) {
    using namespace peer_detail;
    const uint32_t thread = ptx::thread_idx();
    const uint32_t phase = static_cast<uint32_t>(phase_in);
    DeviceState* state = device_state(group);
    const uint64_t epoch = ptx::ld_relaxed_gpu(&state->epoch) + 1;
    const ptx::WaitLimits limits{ptx::ld_relaxed_gpu(&state->limit_ns), &state->expired, &group.record->wait,
                                 group.rank};
    const uint64_t begin = ptx::timer_ns();
    bool in_time = ptx::ld_relaxed_gpu(&state->expired) == 0;
    bool told = false;
    uint32_t teller = thread;
    if (in_time && is_peer(group, thread)) {
        ptx::st_release_sys(&control_slot(window_of(group, thread), group.rank)->epoch, epoch);
        const PeerSlot* slot = control_slot(group.window, thread);
        ptx::Deadline deadline(limits, phase);
        deadline.peer = static_cast<int32_t>(thread);
        uint32_t polls = 0;
        in_time = ptx::wait_until(deadline, epoch, [&](uint64_t& seen) {
            seen = ptx::ld_acquire_sys(&slot->epoch);
            if (static_cast<int64_t>(seen - epoch) >= 0) return true;
            if (++polls % kPollsPerLook != 0) return false;
            if (ptx::ld_acquire_sys(&slot->fatal.kind) != 0) {
                teller = thread;
            } else if (!is_blamed(group, thread, teller)) {
                return false;
            }
            seen = ptx::ld_acquire_sys(&slot->epoch);
            told = static_cast<int64_t>(seen - epoch) < 0;
            return true;
        });
    }
    if (!ptx::sync_block_or(!in_time || told)) {
        if (thread == 0) ptx::st_relaxed_gpu(&state->epoch, epoch);
        ptx::sync_block();  // the next barrier of this kernel reads it in all threads
        return PeerOutcome::kPassed;
    }
    const bool first = told && ptx::atom_relaxed_gpu_exchange(&state->expired, 1u) == 0;
    const bool late = !in_time && ptx::timer_ns() - begin > limits.limit_ns;
    if (first) {
        ptx::st_relaxed_gpu(&state->ended, 1u);
        report_told(group, teller, phase, epoch);
    }
    // An end that is not this barrier's own has its report already.
    const bool is_ended = ptx::sync_block_or(first || ptx::ld_relaxed_gpu(&state->ended) != 0);
    const bool is_expired = ptx::sync_block_or(late) && !is_ended;
    if (is_expired) report_expired(group, phase, epoch, limits.limit_ns);
    ptx::fence_acq_rel_sys();
    ptx::sync_block();
    return is_expired ? PeerOutcome::kExpired : PeerOutcome::kEnded;
}

/// This rank reaches no further barrier, and why. All threads of one block call it, at least num_ranks; for
/// the peers to see all of its arrivals first, in stream order behind its last call. Does nothing the second
/// time.
MOK_DEVICE void peer_end(const PeerGroup& group, const SharedText& reason) {
    using namespace peer_detail;
    const uint32_t thread = ptx::thread_idx();
    DeviceState* state = device_state(group);
    bool is_repeated = false;
    if (thread == 0) {
        is_repeated = ptx::atom_relaxed_gpu_exchange(&state->announced, 1u) != 0;
        // `ended` first: who sees `expired` must not take it for a time-out.
        ptx::st_relaxed_gpu(&state->ended, 1u);
        ptx::fence_acq_rel_gpu();
        ptx::st_relaxed_gpu(&state->expired, 1u);
    }
    if (ptx::sync_block_or(is_repeated) || !is_peer(group, thread)) return;
    const uint64_t epoch = ptx::ld_relaxed_gpu(&state->epoch) + 1;
    tell_peer(group, thread, FatalKind::kAbort, epoch, 0, nullptr, 0, &reason);
}

}  // namespace mok
