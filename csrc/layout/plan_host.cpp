#include "csrc/layout/plan_host.h"

#include <limits>

#include "csrc/layout/check.h"

namespace mok {

void check_plan_shape(const PlanShape& shape) {
    MOK_CHECK(shape.num_ranks >= 1, "num_ranks = ", shape.num_ranks, ": at least one rank is needed.");
    MOK_CHECK(shape.rank >= 0 && shape.rank < shape.num_ranks, "rank = ", shape.rank, ": must lie in [0, ",
              shape.num_ranks, ").");
    MOK_CHECK(shape.num_experts >= 1 && shape.num_experts % shape.num_ranks == 0,
              "num_experts = ", shape.num_experts, ": must be a positive multiple of the ", shape.num_ranks,
              " ranks of the expert-parallel group.");
    MOK_CHECK(shape.top_k >= 1, "top_k = ", shape.top_k, ": must be at least 1.");
    MOK_CHECK(shape.max_tokens >= 0, "max_tokens = ", shape.max_tokens, ": must not be negative.");
    MOK_CHECK(shape.pad >= 1, "pad = ", shape.pad, ": must be at least 1.");
    MOK_CHECK(shape.max_tokens <= std::numeric_limits<int32_t>::max() / shape.top_k,
              "max_tokens = ", shape.max_tokens, " with top_k = ", shape.top_k,
              ": a slot (token * top_k + choice) must fit in 32 bits; pass fewer tokens per call.");
}

void build_plan(const PlanShape& shape, const RankRoutes* ranks, Plan& plan) {
    const int32_t num_local = shape.num_local_experts();
    const int64_t num_cells = static_cast<int64_t>(num_local) * shape.num_ranks;

    // next[expert * R + rank] first counts a rank's routes to an expert, then is the row its next route
    // takes.
    std::vector<int64_t> next(num_cells, 0);
    for (int32_t rank = 0; rank < shape.num_ranks; ++rank) {
        const int64_t num_slots = ranks[rank].num_tokens * shape.top_k;
        for (int64_t slot = 0; slot < num_slots; ++slot) {
            const int32_t expert = local_expert(ranks[rank].ids[slot], shape);
            if (expert >= 0) ++next[static_cast<int64_t>(expert) * shape.num_ranks + rank];
        }
    }

    plan.segment_begin.assign(num_local + 1, 0);
    plan.counts.assign(num_local, 0);
    for (int32_t expert = 0; expert < num_local; ++expert) {
        int64_t row = plan.segment_begin[expert];
        for (int32_t rank = 0; rank < shape.num_ranks; ++rank) {
            int64_t& cell = next[static_cast<int64_t>(expert) * shape.num_ranks + rank];
            const int64_t count = cell;
            cell = row;
            row += count;
        }
        plan.counts[expert] = row - plan.segment_begin[expert];
        plan.segment_begin[expert + 1] =
            plan.segment_begin[expert] + round_up(plan.counts[expert], shape.pad);
    }

    plan.row_peer.assign(plan.num_rows(), -1);
    plan.row_slot.assign(plan.num_rows(), -1);
    for (int32_t rank = 0; rank < shape.num_ranks; ++rank) {
        const int64_t num_slots = ranks[rank].num_tokens * shape.top_k;
        for (int64_t slot = 0; slot < num_slots; ++slot) {
            const int32_t expert = local_expert(ranks[rank].ids[slot], shape);
            if (expert < 0) continue;
            const int64_t row = next[static_cast<int64_t>(expert) * shape.num_ranks + rank]++;
            plan.row_peer[row] = rank;
            plan.row_slot[row] = static_cast<int32_t>(slot);
        }
    }
}

}  // namespace mok
