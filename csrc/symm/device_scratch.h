// Device memory of a workspace's calls: one buffer, dead after each call, shared by all layers of a group.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/symm/device_mapping.h"

namespace mok {

class DeviceScratch {
  public:
    /// At least `bytes`, 256-byte aligned, with unspecified contents; valid until the next larger request,
    /// and to graphs that were captured with it until release. A capture cannot allocate: while one is under
    /// way, throws std::invalid_argument if the buffer is too small. Throws HeapError.
    char* get(DeviceMapping& mapping, int64_t bytes, bool is_capturing);

    int64_t total_bytes() const { return total_bytes_; }
    void release();

  private:
    std::shared_ptr<void> memory_;
    int64_t bytes_ = 0;
    int64_t total_bytes_ = 0;
    bool was_captured_ = false;                // memory_ is in a graph
    std::vector<std::shared_ptr<void>> kept_;  // smaller ones that are
};

}  // namespace mok
