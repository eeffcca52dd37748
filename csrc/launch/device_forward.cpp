#if defined(MOK_WITH_SM90)

#include "csrc/launch/device_forward.h"

#include <algorithm>

#include "csrc/launch/sm90_bf16_moe_forward.h"
#include "csrc/launch/traced_launch.h"
#include "csrc/launch/weighted_sum.h"
#include "csrc/layout/check.h"

namespace mok::launch {

namespace {

constexpr int64_t kElementBytes = 2;

/// Sets the temporaries of `call`; returns their bytes.
int64_t place(const Preparation& preparation, char* memory, MoeForward& call) {
    const schedule::ScheduleSizes& sizes = preparation.shape.sizes;
    const PlanShape& plan = preparation.plan;
    const int64_t hidden = sizes.hidden, tokens = sizes.num_tokens;
    const bool is_forward = sizes.pass == schedule::Pass::kForward;
    const bool has_shared = is_forward && sizes.shared_intermediate > 0;
    MemoryPlacer placer(memory);
    call.ring_x = placer.take(true, sizes.ring_rows, hidden, kElementBytes);
    call.ring_hidden = placer.take(is_forward, sizes.ring_rows, sizes.intermediate, kElementBytes);
    call.shared_hidden = placer.take(has_shared, tokens, sizes.shared_intermediate, kElementBytes);
    call.shared_rows = placer.take(has_shared, tokens, hidden, kElementBytes);
    // Several ranks: in the window.
    const bool comes_home = is_forward && plan.num_ranks == 1;
    call.home_rows = placer.take(comes_home, plan.max_tokens * plan.top_k, hidden, kElementBytes);
    return placer.bytes();
}

void check_context(const DeviceForward& forward, const Preparation& preparation) {
    const schedule::ScheduleSizes& sizes = preparation.shape.sizes;
    MOK_CHECK(sizes.save == schedule::Save::kNone || forward.save_rows >= sizes.ring_rows,
              "the saved context has ", forward.save_rows, " rows, fewer than the ", sizes.ring_rows,
              " that a first chunk may have: pass the context of a forward with the same max_tokens and "
              "ring_rows.");
}

}  // namespace

int64_t device_forward_bytes(const Preparation& preparation) {
    MoeForward unplaced{};
    return place(preparation, nullptr, unplaced);
}

DeviceForwardRun::DeviceForwardRun(Workspace& workspace, const DeviceForward& forward, void* stream)
    : workspace_(workspace), forward_(forward), call_(workspace, stream) {
    call_.check(forward.header);
    if (workspace.num_ranks() == 1 && forward.header.num_tokens == 0) return;
    preparation_ = layer_preparation(workspace, forward.header, false);
    check_context(forward, preparation_);
    memory_ = call_.memory(preparation_, forward.header, forward.tensors, device_forward_bytes(preparation_));
}

void DeviceForwardRun::launch() {
    if (memory_.preparation == nullptr) return;
    const DeviceForward& forward = forward_;
    const Preparation& preparation = preparation_;
    void* stream = call_.stream();
    const TracedLaunch trace(workspace_, forward.header, preparation, stream);
    MoeForward kernel{};
    place(preparation, memory_.rows, kernel);
    if (workspace_.num_ranks() > 1) {
        kernel.home_rows = call_.group().window + workspace_.layout.rows;
        kernel.window_stride = call_.group().stride;
    }
    kernel.shape = preparation.shape;
    kernel.call = call_.prepare(preparation, forward.header, forward.tensors, memory_.preparation);
    kernel.routed = forward.routed;
    kernel.shared = forward.shared;
    kernel.x = call_.own_x().data;
    kernel.x_stride = call_.own_x().stride;
    kernel.saved_x = forward.saved_x;
    kernel.saved_gate = forward.saved_gate;
    kernel.saved_up = forward.saved_up;
    kernel.save_rows = forward.save_rows;
    kernel.saved_shared_gate = forward.saved_shared_gate;
    kernel.saved_shared_up = forward.saved_shared_up;
    kernel.activation = static_cast<int32_t>(forward.header.activation);
    kernel.limit = forward.limit;
    kernel.rank = workspace_.rank();
    kernel.limits = call_.limits();
    kernel.spans = trace.spans();
    trace.stamp(CallMoment::kPrepared);
    launch_sm90_bf16_moe_forward(kernel, stream);
    trace.stamp(CallMoment::kComputed, &kernel.call);
    // Also behind a recomputation: peers have read this rank's x, which may be overwritten from then on.
    call_.meet_outputs();
    trace.stamp(CallMoment::kMet);
    if (preparation.shape.sizes.pass != schedule::Pass::kForward) return;

    WeightedSum sum{};
    sum.dtype = DType::kBFloat16;
    sum.tokens = forward.header.num_tokens;
    sum.top_k = forward.header.top_k;
    sum.hidden = forward.header.hidden;
    sum.rows = kernel.home_rows;
    sum.shared_rows = kernel.shared_rows;
    sum.shared_weight = forward.shared_weight;
    sum.ids = kernel.call.ids;
    sum.weights = forward.topk_weights;
    sum.out = forward.out;
    sum.rows_stride = sum.shared_stride = preparation.shape.sizes.row_bytes;
    sum.out_stride = forward.out_stride;
    sum.expired = kernel.limits.expired;
    launch_weighted_sum(sum, stream);
    trace.stamp(CallMoment::kEnd);
}

}  // namespace mok::launch

#endif  // MOK_WITH_SM90
