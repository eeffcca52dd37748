// The host's plan: the one definition that the device's is tested against.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/layout/plan.h"

namespace mok {

/// One rank's routes: `ids` has num_tokens * top_k entries, each -1 or in [0, E).
struct RankRoutes {
    const int32_t* ids;
    int64_t num_tokens;
};

struct Plan {
    std::vector<int64_t> segment_begin;  // [E_local + 1], padded rows
    std::vector<int64_t> counts;         // [E_local], routes
    std::vector<int32_t> row_peer;       // [rows], -1 on padding
    std::vector<int32_t> row_slot;       // [rows], token * top_k + choice on its home rank; -1 on padding

    int64_t num_rows() const { return segment_begin.back(); }
};

/// Checks sizes, pad and divisibility; throws std::invalid_argument.
void check_plan_shape(const PlanShape& shape);

/// Builds the plan of `shape.rank` from everyone's routes (shape.num_ranks entries). Vectors are reused.
void build_plan(const PlanShape& shape, const RankRoutes* ranks, Plan& plan);

}  // namespace mok
