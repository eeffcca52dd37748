#if defined(MOK_WITH_SM90)

#include "csrc/launch/traced_launch.h"

#include <cuda_runtime.h>

#include "csrc/launch/call_stamp.h"
#include "csrc/launch/sm90_bf16_moe_backward.h"
#include "csrc/launch/sm90_bf16_moe_forward.h"
#include "csrc/launch/stream_order.h"

namespace mok::launch {

TracedLaunch::TracedLaunch(const Workspace& workspace, const CallHeader& header,
                           const Preparation& preparation, void* stream)
    : shape_(preparation.shape), stream_(stream) {
    if (!call_trace().is_on()) return;
    call_.header = header;
    call_.rank = workspace.rank();
    call_.num_ranks = workspace.num_ranks();
    call_.num_ctas = preparation.shape.sizes.num_sms;
    const bool is_captured = is_capturing(static_cast<cudaStream_t>(stream));
    stamps_ =
        call_trace().take(call_, preparation.plan, preparation.shape, workspace.heap->device(), is_captured);
    stamp(CallMoment::kBegin);
}

TaskSpans TracedLaunch::spans() const {
    if (stamps_ == nullptr) return {};
    TaskSpan* tasks = reinterpret_cast<TaskSpan*>(stamps_) + 1;
    return {tasks, tasks + call_.num_tasks, call_.num_tasks, call_.num_pulls};
}

void TracedLaunch::note(CallMoment moment, const schedule::PreparedCall* call) const {
    launch_call_stamp(stamps_, moment, shape_, call, stream_);
}

void load_traced_kernels() {
    load_call_stamp();
    load_sm90_bf16_moe_forward(true);
    load_sm90_bf16_moe_backward(true);
}

}  // namespace mok::launch

#endif  // MOK_WITH_SM90
