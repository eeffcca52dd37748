// The control block at the start of every window: what the ranks of one group tell each other outside the
// data.
//
// Slot s of rank r's block is written by rank s only and read by rank r (and, to find who holds up whom, by
// others); the head is written by its owner, except for the doorbell. All words start as zeros and are never
// reset. `csrc/comm/peer_comm.h` has the protocol of the CPU, `csrc/comm/device/peer_barrier.cuh` that of
// GPUs, which use the epochs, the fatal records and the device state only.
#pragma once

#include <cstdint>

#include "csrc/layout/types.h"

namespace mok {

/// Members of one group; bounds the masks of ranks below. 72 is the largest NVLink domain today.
inline constexpr int kMaxGroupRanks = 128;
/// Calls that a rank can abort in a row before a slow peer loses the text (never the fact) of the oldest.
inline constexpr int kAbortRing = 4;
inline constexpr int64_t kReasonBytes = 416;
inline constexpr int64_t kCallHeaderBytes = 256;
/// The largest page size of Linux machines: what follows a control block starts on a page of its own.
inline constexpr int64_t kControlGranularity = 65536;

/// Text that several processes read while its one writer may replace it: words, so that every access is
/// atomic.
struct SharedText {
    uint64_t bytes;
    uint64_t words[kReasonBytes / 8];
};

/// "I leave call `call` before its first barrier." sequence is 2 call + 1 while the text is being written and
/// 2 call + 2 when it is complete; it only grows.
struct AbortRecord {
    uint64_t sequence;
    SharedText reason;
};

enum class FatalKind : uint64_t {
    kNone = 0,
    kTimeout = 1,
    kAbort = 2,
    kMismatch = 3,  // never sent: every rank sees for itself that calls differ (PeerRecord::headers)
};

/// Written once in the life of a workspace; `kind` is stored last.
struct FatalRecord {
    uint64_t kind;
    uint64_t call;
    uint64_t barrier;  // 1 or 2
    uint64_t blamed[kMaxGroupRanks / 64];
    uint64_t milliseconds;
    SharedText reason;
};

struct alignas(128) PeerSlot {
    uint64_t epoch;   // the last barrier that the peer reached
    uint64_t closed;  // 1: the peer will make no further call
    alignas(128) FatalRecord fatal;
    AbortRecord aborts[kAbortRing];  // call c in place c % kAbortRing
};

/// What the kernels of one workspace on a GPU keep for themselves. No peer looks at it; peers write `told`.
struct alignas(128) DeviceState {
    uint64_t epoch;      // the last peer barrier that this rank passed
    uint64_t limit_ns;   // how long one wait of a barrier may take
    uint32_t expired;    // ptx::WaitLimits::expired: non-zero ends every wait and every later barrier at once
    uint32_t ended;      // 1: by an abort, here or at a peer; nothing is to trap
    uint32_t announced;  // 1: this rank has told its peers that it makes no further call
    uint32_t told;       // by a peer: 1 + the rank of one that has written a fatal record here
    uint32_t blamed[kMaxGroupRanks / 32];  // scratch of a barrier that expires
    uint32_t arrivals;                     // blocks of the publishing kernel that are done
    alignas(128) uint32_t grid_barrier;    // grid_barrier's word
};

struct alignas(128) ControlHead {
    uint32_t doorbell;  // a futex: everything written to this block ends with one increment
    uint32_t sleeping;  // 1 while the owner sleeps on the doorbell
    uint64_t waiting;   // the epoch that the owner waits for; 0 outside barriers
    alignas(128) char header[kCallHeaderBytes];
    DeviceState device;
};

MOK_HD ControlHead* control_head(char* window) {
    return reinterpret_cast<ControlHead*>(window);
}

MOK_HD PeerSlot* control_slot(char* window, int rank) {
    return reinterpret_cast<PeerSlot*>(window + sizeof(ControlHead)) + rank;
}

MOK_HD int64_t control_block_bytes(int num_ranks) {
    return round_up(
        static_cast<int64_t>(sizeof(ControlHead)) + num_ranks * static_cast<int64_t>(sizeof(PeerSlot)),
        kControlGranularity);
}

}  // namespace mok
