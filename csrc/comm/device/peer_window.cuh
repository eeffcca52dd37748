// Where things lie in the windows of a group, for kernels.
#pragma once

#include "csrc/layout/peer_record.h"
#include "csrc/ptx/ptx.h"

namespace mok {

MOK_DEVICE char* window_of(const PeerGroup& group, uint32_t rank) {
    return group.window + (static_cast<int32_t>(rank) - group.rank) * group.stride;
}

/// What a rank has published about its call.
MOK_DEVICE CallHeader* call_header(const PeerGroup& group, uint32_t rank) {
    return reinterpret_cast<CallHeader*>(control_head(window_of(group, rank))->header);
}

MOK_DEVICE DeviceState* device_state(const PeerGroup& group) {
    return &control_head(group.window)->device;
}

}  // namespace mok
