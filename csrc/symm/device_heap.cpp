#include "csrc/symm/device_heap.h"

#include <cstddef>

#include "csrc/comm/errors.h"
#include "csrc/comm/peer_comm.h"
#include "csrc/layout/check.h"

namespace mok {
namespace {

constexpr int64_t kStateOffset = offsetof(ControlHead, device);

}  // namespace

std::unique_ptr<DeviceComm> make_device_comm(SymmHeap& heap) {
    DeviceMapping& mapping = *heap.device_mapping();
    const int rank = heap.rank();
    PeerGroup group{};
    group.window = heap.window(rank);
    group.stride = heap.stride();
    group.record = mapping.device_record(rank);
    group.rank = rank;
    group.num_ranks = heap.num_ranks();
    auto comm = std::make_unique<DeviceComm>(group, mapping.host_record(rank));
    set_device_timeout(heap, *comm, PeerComm::default_timeout());
    return comm;
}

void set_device_timeout(SymmHeap& heap, DeviceComm& comm, double seconds) {
    MOK_CHECK(seconds > 0 && seconds < 1e9, "timeout is ", seconds,
              " seconds, but it must be positive and below 1e9.");
    const auto limit_ns = static_cast<uint64_t>(seconds * 1e9);
    heap.write(heap.rank(), kStateOffset + static_cast<int64_t>(offsetof(DeviceState, limit_ns)), &limit_ns,
               sizeof(limit_ns));
    comm.set_timeout(seconds);
}

void end_device_waits(SymmHeap& heap) {
    static_assert(offsetof(DeviceState, ended) == offsetof(DeviceState, expired) + sizeof(uint32_t));
    const uint32_t expired_and_ended[2] = {1, 1};
    try {
        heap.write(heap.rank(), kStateOffset + static_cast<int64_t>(offsetof(DeviceState, expired)),
                   expired_and_ended, sizeof(expired_and_ended));
    } catch (const HeapError&) {
        // The context is lost: nothing waits any more.
    }
}

}  // namespace mok
