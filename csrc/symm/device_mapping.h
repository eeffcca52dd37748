// Windows of GPU memory: CUDA's virtual memory, passed to the peers as fabric handles or file descriptors.
// This header needs no CUDA; where mok is built without, asking for one throws.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/layout/peer_record.h"
#include "csrc/symm/mapping.h"
#include "csrc/symm/unique_fd.h"

namespace mok {

/// What a rank tells its peers about its GPU.
struct DeviceOffer {
    std::string gpu;      // "NVIDIA H200 (cuda:0)"
    std::string uuid;     // "GPU-..."
    std::string wanted;   // MOK_HEAP_BACKING: "auto", "fabric" or "posix_fd"
    bool has_fd = false;  // its window can be passed as a descriptor
    std::string fabric;   // its window's fabric handle in hexadecimal digits; empty if it has none
    std::string cluster;  // NVLink domain of several machines; empty outside one
    std::string clique;   // part of it whose GPUs reach each other
    std::string
        unreachable;  // uuids of visible GPUs that this one cannot access, each with a comma behind it
};

class DeviceMapping : public Mapping {
  public:
    virtual const DeviceOffer& offer() const = 0;
    /// "fabric", "posix_fd" or "memory": how the windows are shared, once they are.
    virtual const char* backing() const = 0;

    /// The own window for the peers. Throws HeapError.
    virtual UniqueFd export_fd() = 0;
    virtual void map_fd(int window, UniqueFd fd, const std::string& peer) = 0;
    virtual void map_fabric(int window, const std::string& handle, const std::string& peer) = 0;
    /// All windows are mapped: what only this rank needed for that is given back.
    virtual void finish() = 0;

    /// Memory of this device for this process alone; given back with the last reference, when the device has
    /// done what was launched by then. Throws HeapError.
    virtual std::shared_ptr<void> allocate(int64_t bytes) = 0;
    /// Ends when the device has done all that was launched on it so far, or is lost.
    virtual void synchronize() = 0;
    /// This device's context is the thread's current one while the object lives.
    virtual std::shared_ptr<void> make_current() = 0;
    virtual int device() const = 0;
    /// Pinned host memory, all zeros; the same as the host and as the device addresses it. One for each
    /// window that this process made.
    virtual PeerRecord* host_record(int rank) = 0;
    virtual PeerRecord* device_record(int rank) = 0;

  protected:
    using Mapping::Mapping;
};

/// For DeviceMapping's rank: all windows belong to this process, which plays all ranks on one GPU.
inline constexpr int kAllRanks = -1;

/// The windows of num_ranks ranks on GPU `device`, `bytes` each and rounded up, of which the own one has
/// memory, with its first zero_bytes zero (with poison_requested(), no more than the control block is).
/// Throws HeapError, one sentence on what is missing.
std::shared_ptr<DeviceMapping> create_device_mapping(int device, int rank, int num_ranks, int64_t bytes,
                                                     int64_t zero_bytes);

/// What a heap on this device would be made of, found by making a small one.
struct DeviceReport {
    int device = 0;
    std::string gpu;  // empty if there is no such GPU
    std::string uuid;
    std::string backing;  // "fabric", "posix_fd", or "" where windows cannot be shared
    std::string reason;   // why that one, or what is missing
    std::string cluster;
    std::string clique;
    std::vector<int> reachable;    // visible GPUs whose memory this one can access
    std::vector<int> unreachable;  // the others
};

/// Throws nothing for a machine that lacks something: the report says it.
DeviceReport describe_device(int device);

/// Takes the driver, and NVML for what only it knows, from these files from now on; "" is the system's. For
/// tests, which put a stand-in there; no heap on a GPU may be open.
void set_cuda_libraries(const std::string& driver, const std::string& nvml);

}  // namespace mok
