// What a call on a GPU does for mok.trace, between its kernels. Without a trace: nothing.
#pragma once

#include "csrc/launch/call_trace.h"
#include "csrc/launch/device_call.h"

namespace mok::launch {

class TracedLaunch {
  public:
    /// In front of everything that the call launches on `stream` (a cudaStream_t).
    TracedLaunch(const Workspace& workspace, const CallHeader& header, const Preparation& preparation,
                 void* stream);

    /// For the megakernel; empty when the call is not traced.
    TaskSpans spans() const;

    /// The stream has come this far. Behind the megakernel with its `call`. Throws CudaError.
    void stamp(CallMoment moment, const schedule::PreparedCall* call = nullptr) const {
        if (stamps_ != nullptr) note(moment, call);
    }

  private:
    void note(CallMoment moment, const schedule::PreparedCall* call) const;

    const schedule::ScheduleShape& shape_;
    void* stream_;
    TracedCall call_{};
    CallStamps* stamps_ = nullptr;
};

/// Makes the kernels that record resident on the current device. Throws CudaError.
void load_traced_kernels();

}  // namespace mok::launch
