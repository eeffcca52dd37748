// The host's view of the barriers that kernels of a workspace on a GPU make: where they are, and how they
// ended. It makes no CUDA call, so that it can say what happened when the context is lost.
#pragma once

#include <mutex>
#include <string>

#include "csrc/layout/peer_record.h"

namespace mok {

class DeviceComm {
  public:
    /// `record` is `group.record` as the host addresses it, all zeros.
    DeviceComm(const PeerGroup& group, PeerRecord* record) : group_(group), record_(record) {}
    DeviceComm(const DeviceComm&) = delete;
    DeviceComm& operator=(const DeviceComm&) = delete;

    const PeerGroup& group() const { return group_; }

    /// For the other waits of the workspace's kernels: they end, and report, together with the barriers.
    ptx::WaitLimits limits() const;
    void set_timeout(double seconds) { timeout_ = seconds; }
    double timeout() const { return timeout_; }

    /// Throws what has ended the workspace, here or at a peer: PeerTimeout, PeerAborted, or
    /// std::invalid_argument where the ranks' calls differed. To be called before any CUDA call of a mok
    /// function.
    void check();
    /// From now on check() throws PeerAborted with this rank's own reason, unless something else ended it
    /// before.
    void end(const std::string& reason);
    bool ended();

  private:
    void read_record();
    void describe_told(const FatalRecord& told, int by, uint32_t phase);
    void describe_expired();
    void describe_difference();
    void describe_wait();

    PeerGroup group_;
    PeerRecord* record_;
    double timeout_ = 0;
    std::mutex mutex_;
    enum class Error { kAborted, kTimeout, kMismatch };
    std::string error_;
    Error kind_ = Error::kAborted;
};

}  // namespace mok
