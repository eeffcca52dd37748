// Forward and recompute: dispatch, gate/up, activation, down and combine, chunk by chunk through the ring.
#include "csrc/cpu/call.h"
#include "csrc/cpu/executor.h"

namespace mok::cpu {

namespace {

/// Rows of the saved context that no route of the first chunk fills are zeros: outputs hold no stale memory.
void zero_unused(const LayerCall& call, const std::vector<Piece>& pieces) {
    const int64_t inner = call.shape().intermediate * call.elem;
    int64_t row = 0;
    const auto zero_until = [&](int64_t end) {
        if (call.saved.gate)
            call.stages.zero_rows(static_cast<char*>(call.saved.gate) + row * inner, (end - row) * inner);
        if (call.saved.up)
            call.stages.zero_rows(static_cast<char*>(call.saved.up) + row * inner, (end - row) * inner);
        if (call.saved.x) {
            call.stages.zero_rows(static_cast<char*>(call.saved.x) + row * call.row_bytes(),
                                  (end - row) * call.row_bytes());
        }
    };
    for (const Piece& piece : pieces) {
        zero_until(piece.row);
        row = piece.row + piece.rows;
    }
    zero_until(call.saved.rows);
}

void forward_chunk(LayerCall& call, size_t index) {
    const Chunk& chunk = call.chunks[index];
    const bool save = index == 0;
    const bool down = call.inputs.kind == CallKind::kForward;
    call.enter_chunk(chunk);
    StageRows rows = call.ring_rows();
    rows.gate = save ? static_cast<char*>(call.saved.gate) : nullptr;
    rows.up = save ? static_cast<char*>(call.saved.up) : nullptr;
    char* x = save && call.saved.x ? static_cast<char*>(call.saved.x) : call.buffers.x;
    rows.x = x;
    for (const std::vector<Piece>& group : piece_groups(chunk.pieces)) {
        const RowSpan span = padded_span(group);
        call.stages.gather(call.buffers.table.x + span.begin, span.end - span.begin, call.row_bytes(),
                           x + span.begin * call.row_bytes());
        call.stages.gate_up(call.routed, group, rows);
        if (down) call.stages.down(call.routed, group, rows);
    }
}

void forward_shared(LayerCall& call) {
    if (!call.has_shared()) return;
    StageRows rows = call.shared_stage_rows();
    rows.gate = static_cast<char*>(call.saved.shared_gate);
    rows.up = static_cast<char*>(call.saved.shared_up);
    call.stages.gate_up(call.shared, call.shared_pieces(), rows);
    if (call.inputs.kind != CallKind::kForward) return;
    call.enter_shared(nullptr);
    call.stages.down(call.shared, call.shared_pieces(), rows);
}

}  // namespace

void run_forward(Workspace& workspace, const ThreadPool& threads, const LayerInputs& inputs,
                 int64_t gradients, void* out, const SavedContext& saved) {
    LayerCall call(workspace, threads, CallInputs{CallKind::kForward, &inputs, nullptr, 0, gradients}, saved);
    call.run([&] {
        forward_shared(call);
        for (size_t index = 0; index < call.chunks.size(); ++index) forward_chunk(call, index);
        zero_unused(call, call.chunks.empty() ? std::vector<Piece>{} : call.chunks[0].pieces);
    });
    call.stages.combine(call.exchange->own(), call.has_shared() ? call.buffers.shared_rows : nullptr,
                        inputs.shared_weight, inputs.topk_weights, static_cast<char*>(out));
}

void run_recompute(Workspace& workspace, const ThreadPool& threads, const LayerInputs& inputs,
                   int64_t gradients, const SavedContext& saved) {
    LayerCall call(workspace, threads, CallInputs{CallKind::kRecompute, &inputs, nullptr, 0, gradients},
                   saved);
    call.run([&] {
        forward_shared(call);
        if (!call.chunks.empty()) forward_chunk(call, 0);
        zero_unused(call, call.chunks.empty() ? std::vector<Piece>{} : call.chunks[0].pieces);
    });
}

}  // namespace mok::cpu
