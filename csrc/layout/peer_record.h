// What the barriers of one workspace on a GPU need to know, and what they leave in host memory when they end.
#pragma once

#include <cstdint>

#include "csrc/layout/call_header.h"
#include "csrc/layout/control_block.h"
#include "csrc/ptx/wait_record.h"

namespace mok {

/// Pinned host memory, one per workspace, written once: it can be read after the CUDA context is lost.
struct PeerRecord {
    ptx::WaitRecord wait;  // by the first wait that expired, in a barrier between ranks or anywhere else
    uint32_t complete;     // 1: what follows was written, by the peer barrier that ended; stored last
    int32_t by;            // the rank that ended it; this one if its own time was up
    uint32_t phase;
    uint64_t epoch;
    uint64_t seen[kMaxGroupRanks];  // own time was up: the last epoch of each rank
    FatalRecord told;               // else: what the peer said
    CallHeader headers[2];          // of a mismatch: this rank's and that of rank `by`
};

/// The same on every rank but for the addresses. Trivially copyable: part of kernel parameters.
struct PeerGroup {
    char* window;  // of this rank; rank r's lies (r - rank) * stride behind it
    int64_t stride;
    PeerRecord* record;  // as the device addresses it
    int32_t rank;
    int32_t num_ranks;
};

/// Which barrier of a call it is, for the error's text.
enum class PeerPhase : uint32_t {
    kInputs = 1,   // all have published their inputs
    kOutputs = 2,  // all are done with everyone's windows
};

}  // namespace mok
