#include "csrc/cpu/call.h"

#include <algorithm>
#include <utility>

#include "csrc/layout/check.h"

namespace mok::cpu {

namespace {

constexpr int64_t kGroupRows = 1024;  // x, gate, up and h of so many rows stay in L3 between stages

ExpertSet make_set(const ExpertWeights& weights, int64_t num_experts, int64_t hidden, int64_t intermediate) {
    return ExpertSet{&weights, num_experts, hidden, intermediate};
}

}  // namespace

LayerCall::LayerCall(Workspace& workspace_in, const ThreadPool& threads, const CallInputs& inputs_in,
                     const SavedContext& saved_in)
    : workspace(workspace_in),
      lock(workspace_in.mutex),
      inputs(inputs_in),
      saved(saved_in),
      elem(dtype_bytes(inputs_in.layer->shape.compute)),
      routed(make_set(inputs_in.layer->routed, shape().num_experts / workspace_in.num_ranks(), shape().hidden,
                      shape().intermediate)),
      shared(make_set(inputs_in.layer->shared, 1, shape().hidden, shape().shared_intermediate)),
      stages(kernels(), shape(), threads) {
    if (workspace.closed) throw WorkspaceClosed(concat("workspace '", workspace.name, "' was closed."));
    if (workspace.comm && !workspace.heap->in_owner_process()) {  // the windows are not mapped here
        throw WorkspaceClosed(
            concat("workspace '", workspace.name,
                   "' belongs to the process this one was forked from; make the call there, "
                   "or start processes by spawn."));
    }
    if (workspace.comm) workspace.comm->begin_call();
    try {
        check();
        exchange.emplace(workspace, inputs);
        allocate(threads.count);
    } catch (const std::exception& error) {
        if (workspace.comm) workspace.comm->abort_call(error.what());
        throw;
    }
}

void LayerCall::check() const {
    const LayerShape& s = shape();
    MOK_CHECK(s.num_local_experts * workspace.num_ranks() == s.num_experts, "num_experts = ", s.num_experts,
              ", but w_gate has ", s.num_local_experts, " experts on each of ", workspace.num_ranks(),
              " rank(s): it must be their product.");
    const PlanShape plan_shape{workspace.rank(),
                               workspace.num_ranks(),
                               static_cast<int32_t>(s.num_experts),
                               static_cast<int32_t>(s.top_k),
                               s.max_tokens,
                               kDefaultPad};
    check_plan_shape(plan_shape);
    MOK_CHECK(s.num_tokens <= s.max_tokens, "x has T = ", s.num_tokens,
              " tokens, more than max_tokens = ", s.max_tokens,
              ": pass max_tokens = the largest T any rank will pass when the layer is made.");
    MOK_CHECK(s.ring_rows >= kDefaultPad && s.ring_rows % kDefaultPad == 0, "ring_rows = ", s.ring_rows,
              ": must be a positive multiple of ", kDefaultPad, ".");
    if (workspace.comm) {
        MOK_CHECK(s.max_tokens <= workspace.max_tokens && s.hidden == workspace.hidden &&
                      s.top_k == workspace.top_k && s.compute == workspace.dtype,
                  "workspace '", workspace.name, "' was made for max_tokens = ", workspace.max_tokens,
                  ", hidden_size = ", workspace.hidden, ", top_k = ", workspace.top_k,
                  " and its dtype; this call has max_tokens = ", s.max_tokens, ", hidden_size = ", s.hidden,
                  ", top_k = ", s.top_k, ": use a workspace made for these sizes.");
    }
    MOK_CHECK(s.save == SavePolicy::kNone || saved.rows >= std::min(s.ring_rows, worst_case_rows(plan_shape)),
              "the saved context has ", saved.rows,
              " rows, fewer than a first chunk may have: pass the context that "
              "the forward with the same max_tokens and ring_rows returned.");
}

void LayerCall::allocate(int64_t num_workers) {
    Scratch& scratch = workspace.scratch;
    const LayerShape& s = shape();
    // The shared expert's rows go through the same buffers before the routed ones do.
    // A ring longer than the worst case would never be filled.
    const int64_t used_rows = std::min(s.ring_rows, worst_case_rows(exchange->plan_shape()));
    const int64_t rows = std::max(used_rows, has_shared() ? s.num_tokens : 0);
    const int64_t inner = std::max(used_rows * s.intermediate, s.num_tokens * s.shared_intermediate) * elem;
    const int64_t ring = used_rows * row_bytes();
    const auto bytes = [&scratch](ScratchSlot slot, int64_t count) {
        return static_cast<char*>(scratch.get(slot, count));
    };

    buffers.table = RowTable::place(scratch.get(ScratchSlot::kRowTables, RowTable::bytes(rows)), rows);
    buffers.x = bytes(ScratchSlot::kRingX, ring);
    if (inputs.kind != CallKind::kRecompute) buffers.hidden = bytes(ScratchSlot::kRingHidden, inner);
    if (has_shared() && inputs.kind != CallKind::kRecompute) {
        buffers.shared_rows = bytes(ScratchSlot::kSharedRows, s.num_tokens * row_bytes());
    }
    if (backward()) {
        buffers.dout = bytes(ScratchSlot::kRingDout, ring);
        buffers.gate = bytes(ScratchSlot::kRingGate, inner);
        buffers.up = bytes(ScratchSlot::kRingUp, inner);
        buffers.dgate = bytes(ScratchSlot::kRingDgate, inner);
        buffers.dup = bytes(ScratchSlot::kRingDup, inner);
        const int64_t partials = std::max(used_rows * ceil_div(s.intermediate, kDweightBlock),
                                          s.num_tokens * ceil_div(s.shared_intermediate, kDweightBlock));
        buffers.dweight_partials = scratch.get<float>(ScratchSlot::kDweightPartials, partials);
        // Only a segment longer than the ring is cut; whether one can be is a matter of sizes, not of
        // routing.
        const int64_t longest = round_up(workspace.num_ranks() * s.max_tokens * s.top_k, kDefaultPad);
        if (longest > s.ring_rows) {
            buffers.accumulators =
                scratch.get<float>(ScratchSlot::kAccumulators, Stages::accumulator_count(routed));
        }
    }
    float* biases = scratch.get<float>(ScratchSlot::kBiases, routed.bias_count());
    stages.convert_biases(routed, biases);
    routed.biases = biases;

    int64_t worker = stages.worker_bytes(routed, backward());
    if (has_shared()) worker = std::max(worker, stages.worker_bytes(shared, backward()));
    stages.set_worker_scratch(bytes(ScratchSlot::kWorkers, worker * num_workers), worker);
}

void LayerCall::make_plan() {
    const PlanShape plan_shape = exchange->plan_shape();
    std::vector<RankRoutes> routes;
    for (const RankView& rank : exchange->ranks()) routes.push_back({rank.ids, rank.num_tokens});
    build_plan(plan_shape, routes.data(), plan);
    chunks = make_chunks(plan, shape().ring_rows);
}

StageRows LayerCall::ring_rows() const {
    StageRows rows;
    rows.x = buffers.x;
    rows.x_stride = row_bytes();
    rows.dout = buffers.dout;
    rows.dout_stride = row_bytes();
    rows.gate = buffers.gate;
    rows.up = buffers.up;
    rows.hidden = buffers.hidden;
    rows.dgate = buffers.dgate;
    rows.dup = buffers.dup;
    rows.home = buffers.table.home;
    rows.dweight = buffers.table.dweight;
    rows.weight = buffers.table.weight;
    rows.dweight_partials = buffers.dweight_partials;
    return rows;
}

StageRows LayerCall::shared_stage_rows() const {
    StageRows rows = ring_rows();
    rows.x = exchange->own().x;
    rows.x_stride = exchange->own().x_stride;
    rows.dout = exchange->own().dout;
    rows.dout_stride = exchange->own().dout_stride;
    return rows;
}

std::vector<Piece> LayerCall::shared_pieces() const {
    if (shape().num_tokens == 0) return {};
    return {Piece{0, 0, shape().num_tokens, true, true}};
}

void LayerCall::enter_shared(float* dshared_weight) {
    for (int64_t token = 0; token < shape().num_tokens; ++token) {
        buffers.table.home[token] = buffers.shared_rows + token * row_bytes();
        buffers.table.dweight[token] = dshared_weight ? dshared_weight + token : nullptr;
        buffers.table.weight[token] = inputs.layer->shared_weight ? inputs.layer->shared_weight[token] : 1.0f;
    }
}

void LayerCall::enter_chunk(const Chunk& chunk) {
    fill_row_table(plan, chunk, exchange->ranks(), shape().top_k, row_bytes(), backward(), buffers.table);
}

std::vector<std::vector<Piece>> piece_groups(const std::vector<Piece>& pieces) {
    std::vector<std::vector<Piece>> groups;
    int64_t rows = kGroupRows;
    for (const Piece& piece : pieces) {
        if (rows >= kGroupRows) {
            groups.emplace_back();
            rows = 0;
        }
        groups.back().push_back(piece);
        rows += piece.rows;
    }
    return groups;
}

RowSpan padded_span(const std::vector<Piece>& group) {
    const Piece& last = group.back();
    return RowSpan{group.front().row, last.row + round_up(last.rows, kDefaultPad)};
}

}  // namespace mok::cpu
