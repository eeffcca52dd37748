// Which wait of a megakernel a ptx::WaitRecord tells of. Barriers between ranks have PeerPhase, below these.
#pragma once

#include <cstdint>

namespace mok {

enum class WaitPlace : uint32_t {
    kTask = 32,       // the scheduler, for counters that a task's operands depend on
    kScheduler = 33,  // the scheduler, for the other warps of its block
    kLoader = 34,     // the loader, for a task or a free stage
    kConsumer = 35,   // a consumer, for a task, a full stage or its staging buffer
    kStore = 36,      // the store warp, for a task or staged results
    kPullSlot = 37,   // the pull warp, for the readers of a ring row
    kPullLoad = 38,   // the pull warp, for a row from its home rank
};

}  // namespace mok
