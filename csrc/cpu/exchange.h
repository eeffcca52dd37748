// One call as all ranks see it: inputs published in the heap, the two barriers, and where each rank's rows
// lie.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/cpu/executor.h"
#include "csrc/layout/plan_host.h"

namespace mok::cpu {

/// What this rank can reach of one rank, itself included.
struct RankView {
    int64_t num_tokens;
    const int32_t* ids;    // [T, K]
    const float* weights;  // [T, K]; backward
    const char* x;         // [T, H]
    int64_t x_stride;      // bytes
    const char* dout;      // [T, H]; backward
    int64_t dout_stride;   // bytes
    char* rows;            // [T * K, H]: rows that come home to that rank
    float* dweights;       // [T * K]
};

struct CallInputs {
    CallKind kind;
    const LayerInputs* layer;
    const void* dout = nullptr;
    int64_t dout_row_stride = 0;
    int64_t gradients = 0;
};

/// Publishes this rank's inputs at construction (nothing waits yet), so that all checks and allocations of a
/// call can be made between `begin` and `open`. A rank that must raise there calls Workspace::abort first.
class Exchange {
  public:
    Exchange(Workspace& workspace, const CallInputs& inputs);

    /// The first barrier; then all ranks' headers are compared. Throws PeerTimeout, PeerAborted or, on all
    /// ranks alike, std::invalid_argument where their settings differ.
    void open();
    /// The second barrier: everyone's rows are home and nobody reads this rank's inputs any more.
    void close();

    const std::vector<RankView>& ranks() const { return ranks_; }
    const RankView& own() const { return ranks_[rank_]; }
    PlanShape plan_shape() const;

  private:
    void publish_local(const CallInputs& inputs);
    void publish_in_window(const CallInputs& inputs);

    Workspace& workspace_;
    LayerShape shape_;
    int rank_;
    int num_ranks_;
    CallHeader header_{};
    std::vector<RankView> ranks_;
};

}  // namespace mok::cpu
