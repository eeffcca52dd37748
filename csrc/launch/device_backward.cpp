#if defined(MOK_WITH_SM90)

#include "csrc/launch/device_backward.h"

#include <cuda_runtime.h>

#include "csrc/launch/error.h"
#include "csrc/launch/sm90_bf16_moe_backward.h"
#include "csrc/launch/traced_launch.h"
#include "csrc/launch/weighted_sum.h"
#include "csrc/layout/check.h"

namespace mok::launch {

namespace {

constexpr int64_t kElementBytes = 2, kFloatBytes = 4, kPartialColumns = 64;

/// Sets the temporaries of `call`; returns their bytes.
int64_t place(const schedule::ScheduleShape& shape, const PlanShape& plan, char* memory, MoeBackward& call) {
    const schedule::ScheduleSizes& sizes = shape.sizes;
    const int64_t ring = sizes.ring_rows, hidden = sizes.hidden, inner = sizes.intermediate;
    const int64_t tokens = sizes.num_tokens, shared = sizes.shared_intermediate;
    const int64_t slots = plan.max_tokens * plan.top_k;
    const bool routed = shape.routed.dhidden > 0, is_shared = shape.shared.dhidden > 0;
    const bool saves_none = sizes.save == schedule::Save::kNone;
    const bool has_later_chunks = worst_case_rows(plan) > ring;
    MemoryPlacer arena(memory);
    const auto rows = [&](bool is_used, int64_t count, int64_t columns) {
        return arena.take(is_used, count, columns, kElementBytes);
    };
    const auto floats = [&](bool is_used, int64_t count, int64_t columns) {
        return arena.take<float>(is_used, count, columns, kFloatBytes);
    };
    call.ring_x = rows(routed, ring, hidden);
    call.ring_dout = rows(routed, ring, hidden);
    call.ring_gate = rows(routed && (saves_none || has_later_chunks), ring, inner);
    call.ring_up = rows(routed && (saves_none || has_later_chunks), ring, inner);
    call.ring_dgate = rows(routed, ring, inner);
    call.ring_dup = rows(routed, ring, inner);
    call.ring_hidden = rows(routed, ring, inner);
    call.ring_partials = floats(routed, ring, ceil_div(inner, kPartialColumns));
    call.ring_weights = floats(shape.routed.bias[schedule::kDown] > 0, ring, 1);
    // Whether a segment can be longer than the ring is a matter of sizes, not of routing.
    const bool may_cut = round_up(plan.max_routes(), plan.pad) > ring;
    call.accumulators =
        floats(may_cut && shape.routed.span_tiles() > 0, moe_backward_accumulators(hidden, inner), 1);
    if (saves_none) {
        call.shared_gate = rows(is_shared, tokens, shared);
        call.shared_up = rows(is_shared, tokens, shared);
    }
    call.shared_dgate = rows(is_shared, tokens, shared);
    call.shared_dup = rows(is_shared, tokens, shared);
    call.shared_hidden = rows(is_shared, tokens, shared);
    call.shared_partials = floats(is_shared, tokens, ceil_div(shared, kPartialColumns));
    call.shared_rows = rows(is_shared && shape.shared.dx > 0, tokens, hidden);
    if (plan.num_ranks == 1) call.home_rows = rows(shape.routed.dx > 0, slots, hidden);
    return arena.bytes();
}

void copy_floats(float* to, const float* from, int64_t count, void* stream) {
    if (count == 0) return;
    check_cuda(cudaMemcpyAsync(to, from, static_cast<size_t>(count * kFloatBytes), cudaMemcpyDeviceToDevice,
                               static_cast<cudaStream_t>(stream)),
               "copying weights of routes");
}

void zero_floats(float* to, int64_t count, void* stream) {
    if (count == 0) return;
    check_cuda(
        cudaMemsetAsync(to, 0, static_cast<size_t>(count * kFloatBytes), static_cast<cudaStream_t>(stream)),
        "zeroing gradients of routes");
}

/// What the call has besides its temporaries and rows.
void set_tensors(const DeviceBackward& backward, MoeBackward& call) {
    call.routed = backward.routed;
    call.shared = backward.shared;
    call.saved_x = backward.saved.x;
    call.saved_gate = backward.saved.gate;
    call.saved_up = backward.saved.up;
    call.save_rows = backward.saved.rows;
    if (backward.saved.shared_gate != nullptr) {
        call.shared_gate = backward.saved.shared_gate;
        call.shared_up = backward.saved.shared_up;
    }
    call.shared_weight = backward.shared_weight;
    call.shared_weight_grads = backward.shared_weight_grads;
    call.routed_gradients = backward.routed_gradients;
    call.shared_gradients = backward.shared_gradients;
    call.accumulate = backward.accumulate;
    call.activation = static_cast<int32_t>(backward.header.activation);
    call.limit = backward.limit;
}

}  // namespace

int64_t device_backward_bytes(const schedule::ScheduleShape& shape, const PlanShape& plan) {
    MoeBackward unplaced{};
    return place(shape, plan, nullptr, unplaced);
}

DeviceBackwardRun::DeviceBackwardRun(Workspace& workspace, const DeviceBackward& backward, void* stream)
    : workspace_(workspace), backward_(backward), call_(workspace, stream) {
    call_.check(backward.header);
    preparation_ = layer_preparation(workspace, backward.header, !backward.accumulate);
    memory_ = call_.memory(preparation_, backward.header, backward.tensors,
                           device_backward_bytes(preparation_.shape, preparation_.plan));
}

void DeviceBackwardRun::launch() {
    const DeviceBackward& backward = backward_;
    const Preparation& preparation = preparation_;
    void* stream = call_.stream();
    const TracedLaunch trace(workspace_, backward.header, preparation, stream);
    MoeBackward kernel{};
    place(preparation.shape, preparation.plan, memory_.rows, kernel);
    set_tensors(backward, kernel);
    const int64_t routes = backward.header.num_tokens * backward.header.top_k;
    float* window_grads = nullptr;  // of several ranks
    if (workspace_.num_ranks() == 1) {
        kernel.weights = backward.topk_weights;
        kernel.home_weight_grads = backward.topk_weight_grads;
    } else {
        const PeerGroup& group = call_.group();
        float* weights = reinterpret_cast<float*>(group.window + workspace_.layout.weights);
        window_grads = reinterpret_cast<float*>(group.window + workspace_.layout.dweights);
        kernel.weights = weights;
        kernel.home_rows = group.window + workspace_.layout.rows;
        kernel.home_weight_grads = window_grads;
        kernel.window_stride = group.stride;
        copy_floats(weights, backward.topk_weights, routes, stream);
    }
    // A choice that is no route is written by nobody. Peers write behind the barrier of `prepare`.
    const bool wants_weights = preparation.shape.wants(schedule::kGradientWeights);
    if (wants_weights) zero_floats(kernel.home_weight_grads, routes, stream);

    kernel.shape = preparation.shape;
    kernel.call = call_.prepare(preparation, backward.header, backward.tensors, memory_.preparation);
    kernel.x = call_.own_x().data;
    kernel.x_stride = call_.own_x().stride;
    kernel.dout = call_.own_dout().data;
    kernel.dout_stride = call_.own_dout().stride;
    kernel.rank = workspace_.rank();
    kernel.limits = call_.limits();
    kernel.spans = trace.spans();
    trace.stamp(CallMoment::kPrepared);
    launch_sm90_bf16_moe_backward(kernel, stream);
    trace.stamp(CallMoment::kComputed, &kernel.call);
    call_.meet_outputs();
    trace.stamp(CallMoment::kMet);

    if (wants_weights && window_grads != nullptr) {
        copy_floats(backward.topk_weight_grads, window_grads, routes, stream);
    }
    if (!preparation.shape.wants(schedule::kGradientX)) return;
    WeightedSum sum{};
    sum.dtype = DType::kBFloat16;
    sum.tokens = backward.header.num_tokens;
    sum.top_k = backward.header.top_k;
    sum.hidden = backward.header.hidden;
    sum.rows = kernel.home_rows;
    sum.shared_rows = kernel.shared_rows;
    sum.ids = kernel.call.ids;
    sum.out = backward.dx;
    sum.rows_stride = sum.shared_stride = preparation.shape.sizes.row_bytes;
    sum.out_stride = backward.dx_stride;
    sum.expired = kernel.limits.expired;
    launch_weighted_sum(sum, stream);
    trace.stamp(CallMoment::kEnd);
}

}  // namespace mok::launch

#endif  // MOK_WITH_SM90
