// The calls of one workspace follow each other on the device, whichever streams they come on: they share its
// memory. A call on another stream waits for the last one by an event.
#pragma once

#include <driver_types.h>

#include <cstdint>

namespace mok::launch {

class StreamOrder {
  public:
    StreamOrder() = default;
    StreamOrder(const StreamOrder&) = delete;
    StreamOrder& operator=(const StreamOrder&) = delete;
    ~StreamOrder();

    /// Before a call's first launch: `stream` waits for the last call, if that was on another one. Calls that
    /// are captured follow each other inside their graph; how replays are ordered is for who replays to say.
    /// Throws CudaError.
    void enter(cudaStream_t stream);
    /// Behind its last launch. Throws nothing.
    void leave(cudaStream_t stream);

  private:
    /// Calls outside captures, and those of the last capture: events of one are of no use to the other.
    struct Last {
        cudaEvent_t done = nullptr;
        cudaStream_t stream = nullptr;
        bool is_recorded = false;
    };

    Last eager_, captured_;
    unsigned long long capture_ = 0;  // the capture of captured_
};

/// Whether `stream` is being captured.
bool is_capturing(cudaStream_t stream);

}  // namespace mok::launch
