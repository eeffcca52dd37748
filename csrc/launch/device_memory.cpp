#if defined(MOK_WITH_SM90)

#include "csrc/launch/device_memory.h"

#include <algorithm>

#include "csrc/comm/peer_comm.h"
#include "csrc/launch/device_backward.h"
#include "csrc/launch/device_forward.h"
#include "csrc/layout/window.h"

namespace mok::launch {

namespace {

constexpr int64_t kAlign = 256, kGranularity = 2 << 20;  // csrc/symm/device_memory.h, device_scratch.cpp

struct Temporaries {
    int64_t plan, rows;
    int64_t bytes() const { return plan + rows; }
};

Temporaries temporaries_of(CallHeader header, CallKind kind, const CallPlace& place) {
    header.kind = static_cast<int64_t>(kind);
    const Preparation preparation =
        layer_preparation(place, header, /* zero_idle */ kind == CallKind::kBackward);
    const int64_t rows = kind == CallKind::kBackward
                             ? device_backward_bytes(preparation.shape, preparation.plan)
                             : device_forward_bytes(preparation);
    return {round_up(preparation_bytes(preparation), kAlign), rows};
}

}  // namespace

DeviceMemory device_memory(const CallHeader& header, int32_t num_ranks, uint32_t multiprocessors) {
    const CallPlace place{0, num_ranks, multiprocessors, 0};
    const Temporaries forward = temporaries_of(header, CallKind::kForward, place);
    const Temporaries backward = temporaries_of(header, CallKind::kBackward, place);
    const Temporaries& most = forward.bytes() > backward.bytes() ? forward : backward;
    DeviceMemory memory{};
    memory.plan = most.plan;
    memory.rows = most.rows;
    memory.rounding = round_up(most.bytes(), kGranularity) - most.bytes();
    int64_t window = PeerComm::control_bytes(num_ranks);
    if (num_ranks == 1) {
        const int64_t row_bytes = header.hidden * dtype_bytes(static_cast<DType>(header.dtype));
        memory.home_rows = round_up(header.max_tokens * header.top_k * row_bytes, kAlign);
        memory.rows -= memory.home_rows;  // among the temporaries
    } else {
        const WindowLayout layout = window_layout(window, header.max_tokens, header.top_k, header.hidden,
                                                  static_cast<DType>(header.dtype));
        memory.inputs = layout.rows - layout.ids;
        memory.home_rows = layout.dweights - layout.rows;
        window = layout.bytes;
    }
    memory.flags = round_up(window, kGranularity) - memory.inputs - (num_ranks > 1 ? memory.home_rows : 0);
    return memory;
}

}  // namespace mok::launch

#endif  // MOK_WITH_SM90
