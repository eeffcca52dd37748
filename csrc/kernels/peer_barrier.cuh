// One block per rank: a barrier among the ranks of a group in stream order, and the end of a workspace.
// csrc/comm/device/peer_barrier.cuh has the protocol and why the order holds.
#pragma once

#include "csrc/comm/device/peer_barrier.cuh"

namespace mok {

struct PeerBarrierParams {
    PeerGroup group;
    PeerPhase phase;
};

__global__ void peer_barrier_kernel(const __grid_constant__ PeerBarrierParams params) {
    const PeerOutcome outcome = peer_barrier(params.group, params.phase);
    if (outcome == PeerOutcome::kExpired && ptx::thread_idx() == 0) ptx::trap();
}

struct PeerEndParams {
    PeerGroup group;
    SharedText reason;
};

__global__ void peer_end_kernel(const __grid_constant__ PeerEndParams params) {
    peer_end(params.group, params.reason);
}

}  // namespace mok
