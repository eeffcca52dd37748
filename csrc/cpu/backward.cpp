// Backward: dispatch of dout (and x), recompute of what was not saved, dhidden, dx, weight gradients, combine
// of dx.
#include <cstring>

#include "csrc/cpu/call.h"
#include "csrc/cpu/executor.h"

namespace mok::cpu {

namespace {

void backward_group(const LayerCall& call, const ExpertSet& experts, const std::vector<Piece>& group,
                    const StageRows& rows, bool want_dx, bool want_dweight, const ExpertGradients& gradients,
                    bool any_gradient, bool accumulate) {
    if (want_dx || want_dweight || any_gradient) call.stages.dhidden(experts, group, rows);
    if (want_dweight) call.stages.router_gradient(experts, group, rows);
    if (want_dx) call.stages.dx(experts, group, rows);
    if (any_gradient) {
        call.stages.weight_gradients(experts, group, rows, gradients, accumulate, call.buffers.accumulators);
    }
}

void backward_chunk(LayerCall& call, size_t index, const BackwardOutputs& outputs) {
    const Chunk& chunk = call.chunks[index];
    const SavePolicy save = call.shape().save;
    const bool has_gate_up = index == 0 && save != SavePolicy::kNone;
    const bool has_x = index == 0 && save == SavePolicy::kAll;
    // x is an operand of gate and up, and of their weight gradients.
    const bool needs_x = !has_x && (!has_gate_up || call.wants(3 * kGradRouted));
    call.enter_chunk(chunk);
    StageRows rows = call.ring_rows();
    if (has_gate_up) {
        rows.gate = static_cast<char*>(call.saved.gate);
        rows.up = static_cast<char*>(call.saved.up);
    }
    if (has_x) rows.x = static_cast<const char*>(call.saved.x);
    for (const std::vector<Piece>& group : piece_groups(chunk.pieces)) {
        const RowSpan span = padded_span(group);
        const int64_t num_rows = span.end - span.begin;
        const int64_t offset = span.begin * call.row_bytes();
        call.stages.gather(call.buffers.table.dout + span.begin, num_rows, call.row_bytes(),
                           call.buffers.dout + offset);
        if (needs_x) {
            call.stages.gather(call.buffers.table.x + span.begin, num_rows, call.row_bytes(),
                               call.buffers.x + offset);
        }
        if (!has_gate_up) {
            StageRows recompute = rows;
            recompute.hidden = nullptr;
            call.stages.gate_up(call.routed, group, recompute);
        }
        backward_group(call, call.routed, group, rows, call.wants(kGradX), call.wants(kGradWeights),
                       outputs.routed, call.wants(kAnyRouted), outputs.accumulate);
    }
}

void backward_shared(LayerCall& call, const BackwardOutputs& outputs) {
    if (!call.has_shared() || !call.wants(kGradX | kGradSharedWeight | kAnyShared)) return;
    const std::vector<Piece> pieces = call.shared_pieces();
    call.enter_shared(outputs.dshared_weight);
    StageRows rows = call.shared_stage_rows();
    if (call.shape().save != SavePolicy::kNone) {
        rows.gate = static_cast<char*>(call.saved.shared_gate);
        rows.up = static_cast<char*>(call.saved.shared_up);
    } else {
        StageRows recompute = rows;
        recompute.hidden = nullptr;
        call.stages.gate_up(call.shared, pieces, recompute);
    }
    backward_group(call, call.shared, pieces, rows, call.wants(kGradX), call.wants(kGradSharedWeight),
                   outputs.shared, call.wants(kAnyShared), outputs.accumulate);
    if (!outputs.accumulate) call.stages.zero_idle(call.shared, {call.shape().num_tokens}, outputs.shared);
}

/// The gradients of the router's weights came home slot by slot; a slot that is no route gets 0.
void take_dweights(const LayerCall& call, float* dweights) {
    const RankView& own = call.exchange->own();
    for (int64_t slot = 0; slot < own.num_tokens * call.shape().top_k; ++slot) {
        dweights[slot] = own.ids[slot] < 0 ? 0.0f : own.dweights[slot];
    }
}

}  // namespace

void run_backward(Workspace& workspace, const ThreadPool& threads, const LayerInputs& inputs,
                  const void* dout, int64_t dout_row_stride, int64_t gradients, const SavedContext& saved,
                  const BackwardOutputs& outputs) {
    LayerCall call(workspace, threads,
                   CallInputs{CallKind::kBackward, &inputs, dout, dout_row_stride, gradients}, saved);
    call.run([&] {
        backward_shared(call, outputs);
        for (size_t index = 0; index < call.chunks.size(); ++index) backward_chunk(call, index, outputs);
        if (!outputs.accumulate) call.stages.zero_idle(call.routed, call.plan.counts, outputs.routed);
    });
    if (call.wants(kGradX)) {
        call.stages.combine(call.exchange->own(), call.has_shared() ? call.buffers.shared_rows : nullptr,
                            nullptr, nullptr, static_cast<char*>(outputs.dx));
    }
    if (call.wants(kGradWeights)) take_dweights(call, outputs.dweights);
}

}  // namespace mok::cpu
