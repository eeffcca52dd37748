// What the layers of one expert-parallel group share: the windows, the barriers between ranks, and local
// scratch.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "csrc/comm/device_comm.h"
#include "csrc/comm/peer_comm.h"
#include "csrc/layout/window.h"
#include "csrc/symm/device_scratch.h"
#include "csrc/symm/heap.h"
#include "csrc/symm/scratch.h"

namespace mok {

/// One workspace is one order of calls: the mutex is held for the whole of a call. With one rank there is
/// neither a window layout nor a barrier, and any sizes may come; with several the sizes below are limits of
/// every call.
struct Workspace {
    std::string name;
    std::shared_ptr<SymmHeap> heap;           // null for one rank without an arena
    std::unique_ptr<PeerComm> comm;           // null for one rank and on a GPU
    std::unique_ptr<DeviceComm> device_comm;  // on a GPU, once connected
    WindowLayout layout{};
    int64_t max_tokens = 0;
    int64_t hidden = 0;
    int64_t top_k = 0;
    DType dtype = DType::kFloat32;
    Scratch scratch;
    DeviceScratch device_scratch;
    std::shared_ptr<void> launch_state;  // csrc/launch's own
    uint32_t most_blocks = 0;            // multiprocessors that its kernels may use; 0: all of the GPU
    std::mutex mutex;
    bool closed = false;

    int64_t scratch_bytes() const { return scratch.total_bytes() + device_scratch.total_bytes(); }
    int rank() const { return heap ? heap->rank() : 0; }
    int num_ranks() const { return heap ? heap->num_ranks() : 1; }
    bool is_device() const { return heap && heap->device() != kHostDevice; }
};

}  // namespace mok
