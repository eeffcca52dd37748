// One call of a workspace on a GPU: what all of its kernels have in common, from the checks to the last
// launch.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "csrc/launch/prepare.h"
#include "csrc/symm/workspace.h"

namespace mok::launch {

/// What a rank brings to a call. Tensors lie on the workspace's device.
struct CallTensors {
    const void* topk_ids;  // [T, K], contiguous
    bool ids_are_int64;
    InputRows x;     // [T, H]
    InputRows dout;  // [T, H], backward only
};

class DeviceCall {
  public:
    /// Takes the workspace for as long as the object lives, and makes `stream` (a cudaStream_t) wait for its
    /// last call. Throws what has ended the workspace, WorkspaceClosed, and CudaError.
    DeviceCall(Workspace& workspace, void* stream);
    DeviceCall(const DeviceCall&) = delete;
    DeviceCall& operator=(const DeviceCall&) = delete;
    ~DeviceCall();

    /// Checks sizes that `header` and the workspace must agree on. Throws std::invalid_argument.
    void check(const CallHeader& header) const;

    /// Device memory until the call ends, with unspecified contents. To be asked for once.
    char* scratch(int64_t bytes);

    /// Publishes this rank's inputs, waits (on the device) for the peers', and makes plan, table and pull
    /// lists. `header` has the call's settings and T; the offsets are filled in here. `memory` is
    /// preparation_memory() of scratch. `times` as in launch_prepare.
    schedule::PreparedCall prepare(const Preparation& preparation, const CallHeader& header,
                                   const CallTensors& tensors, char* memory, uint64_t* times = nullptr);
    int64_t preparation_memory(const Preparation& preparation, const CallHeader& header,
                               const CallTensors& tensors) const;

    /// All ranks are done with everyone's windows: rows have come home. One rank: nothing.
    void meet_outputs();

    void* stream() const { return stream_; }
    const PeerGroup& group() const;
    ptx::WaitLimits limits() const;

  private:
    InputRows staged(const InputRows& rows, int64_t num_rows, int64_t row_bytes, char*& memory) const;
    StagedRows publish_rows(const InputRows& rows, int64_t num_rows, int64_t row_bytes, int64_t staging,
                            int64_t& offset) const;

    Workspace& workspace_;
    std::unique_lock<std::mutex> lock_;
    std::shared_ptr<void> current_;  // the device
    void* stream_;
};

}  // namespace mok::launch
