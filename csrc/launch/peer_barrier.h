// Barriers between ranks in stream order.
#pragma once

#include <string>

#include "csrc/layout/peer_record.h"

namespace mok::launch {

/// Makes the kernels below resident on the current device. To be called before the first barrier: a module
/// that is loaded lazily may wait for a running kernel, which may wait for this rank.
void load_peer_kernels();

/// Launches on `stream` (a cudaStream_t) and returns at once; right under graph capture and replay. Later
/// work of the stream on any rank sees what earlier work of it did on every rank. Throws CudaError.
void launch_peer_barrier(const PeerGroup& group, PeerPhase phase, void* stream);

/// Launches on `stream`, behind this rank's last call: the peers leave the barriers that follow with the
/// reason.
void launch_peer_end(const PeerGroup& group, const std::string& reason, void* stream);

}  // namespace mok::launch
