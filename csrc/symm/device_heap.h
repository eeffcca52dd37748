// Barriers over a heap on a GPU: what of them lies in the heap.
#pragma once

#include <memory>

#include "csrc/comm/device_comm.h"
#include "csrc/symm/heap.h"

namespace mok {

/// For a connected heap; waits take PeerComm::default_timeout() at most until told otherwise.
std::unique_ptr<DeviceComm> make_device_comm(SymmHeap& heap);
/// Holds for barriers that begin from now on, also for those of captured graphs.
void set_device_timeout(SymmHeap& heap, DeviceComm& comm, double seconds);
/// Barriers of this rank that wait now, or begin later, return without trapping. Throws nothing.
void end_device_waits(SymmHeap& heap);

}  // namespace mok
