// One call of the executor: its exchange, plan, chunks, buffers and experts, and how errors end it.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "csrc/cpu/exchange.h"
#include "csrc/cpu/rows.h"
#include "csrc/cpu/stages.h"

namespace mok::cpu {

/// Bits of the `gradients` mask; kGradRouted and kGradShared are the first of gate, up, down (and three
/// biases).
enum GradientBit : int64_t {
    kGradX = 1 << 0,
    kGradWeights = 1 << 1,
    kGradSharedWeight = 1 << 2,
    kGradRouted = 1 << 3,
    kGradShared = 1 << 9,
};
constexpr int64_t kAnyRouted = 63 * kGradRouted;
constexpr int64_t kAnyShared = 7 * kGradShared;

/// Temporaries of one call, in the workspace's scratch; null where a call has no use for them.
struct CallBuffers {
    RowTable table;
    char* x;  // the ring
    char* dout;
    char* gate;
    char* up;
    char* hidden;
    char* dgate;
    char* dup;
    float* dweight_partials;
    char* shared_rows;  // [T, H]: y or dx of the shared expert
    float* accumulators;
};

struct LayerCall {
    /// Starts the call: takes the workspace, checks, publishes and allocates. A failure here tells the peers
    /// and leaves the workspace usable for the next call.
    LayerCall(Workspace& workspace, const ThreadPool& threads, const CallInputs& inputs,
              const SavedContext& saved);

    /// Runs `compute` between the two barriers, with plan and chunks made. An exception in it reaches all
    /// ranks.
    template <typename Compute>
    void run(const Compute& compute) {
        exchange->open();
        try {
            make_plan();
            compute();
        } catch (const std::exception& error) {
            if (workspace.comm) workspace.comm->abort_fatal(error.what());
            throw;
        }
        exchange->close();
    }

    const LayerShape& shape() const { return inputs.layer->shape; }
    int64_t row_bytes() const { return shape().hidden * elem; }
    bool wants(int64_t bits) const { return (inputs.gradients & bits) != 0; }
    bool has_shared() const { return shape().shared_intermediate > 0; }
    bool backward() const { return inputs.kind == CallKind::kBackward; }

    /// The ring's buffers for routed rows, and those of the shared expert's stage over this rank's own rows.
    StageRows ring_rows() const;
    StageRows shared_stage_rows() const;
    std::vector<Piece> shared_pieces() const;
    /// Fills the row table for the own rows: y or dx to shared_rows, the gate's gradient to `dshared_weight`.
    void enter_shared(float* dshared_weight);
    /// Fills the row table for a chunk.
    void enter_chunk(const Chunk& chunk);

    Workspace& workspace;
    std::unique_lock<std::mutex> lock;
    CallInputs inputs;
    SavedContext saved;
    int64_t elem;
    ExpertSet routed;
    ExpertSet shared;
    Stages stages;
    CallBuffers buffers{};
    std::optional<Exchange> exchange;
    Plan plan;
    std::vector<Chunk> chunks;

  private:
    void check() const;
    void allocate(int64_t num_workers);
    void make_plan();
};

/// Runs of a chunk's pieces that are worked on together, so that their rows stay in cache between stages.
std::vector<std::vector<Piece>> piece_groups(const std::vector<Piece>& pieces);

/// Ring rows [begin, end) of a group, the padding of its last piece included.
struct RowSpan {
    int64_t begin;
    int64_t end;
};
RowSpan padded_span(const std::vector<Piece>& group);

}  // namespace mok::cpu
