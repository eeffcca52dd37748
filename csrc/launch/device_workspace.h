// What a rank launches for its workspace on a GPU, outside the layer's own kernels.
#pragma once

#include <string>

#include "csrc/layout/peer_record.h"
#include "csrc/symm/workspace.h"

namespace mok::launch {

/// To be called once the workspace is connected. Throws CudaError.
void prepare_device_workspace(Workspace& workspace);

/// A barrier of all ranks on `stream` (a cudaStream_t); returns at once. Throws what has ended the workspace
/// before, WorkspaceClosed, and CudaError.
void device_barrier(Workspace& workspace, PeerPhase phase, void* stream);

/// This rank makes no further call: its peers leave the barriers that follow with the reason, and so does
/// every later call here. The order is that of `stream`; while that is being captured, now.
void abort_device_workspace(Workspace& workspace, const std::string& reason, void* stream);

/// `close_workspace` for one on a GPU; the peers learn that no call follows. Throws nothing.
void close_device_workspace(Workspace& workspace, double seconds);

}  // namespace mok::launch
