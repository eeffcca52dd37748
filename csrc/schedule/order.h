// The order of runs. The pass's first phase visits the pieces in row order; a later phase of piece d comes
// right before the first piece g of the first phase that lies `lag_blocks` behind d, or that needs d's ring
// slots. Forward, g needs the slots of its own row blocks. Backward it needs those of its whole chunk, and a
// slot is free only when the whole span in it has been summed over.
//
// Both conditions are monotone in d and g, so a run's place in the order follows from binary searches over
// the pieces: no run depends on the place of another.
#pragma once

#include <cstdint>

#include "csrc/schedule/table.h"

namespace mok::schedule {

/// Whether phase `phase_idx` (>= 1) of piece d comes before the first phase of piece g; d < g.
MOK_HD bool comes_before(const ScheduleShape& shape, const Table& table, int32_t phase_idx, int32_t d,
                         int32_t g) {
    const Piece& later = table.pieces[g];
    if (later.begin >= table.pieces[d].end + shape.phases[phase_idx].lag_blocks) return true;
    const bool by_chunk = shape.reuse_by_chunk;
    const int32_t reach = (by_chunk ? table.chunks[later.chunk].end : later.end) - shape.reuse_blocks;
    return (by_chunk ? table.pieces[d].span_begin : table.pieces[d].begin) < reach;
}

/// The piece whose first phase follows phase `phase_idx` of piece d; num_pieces when none does.
MOK_HD int32_t follower(const ScheduleShape& shape, const Table& table, int32_t phase_idx, int32_t d) {
    if (phase_idx == 0) return d;
    int32_t low = d + 1, high = table.num_pieces;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (comes_before(shape, table, phase_idx, d, middle)) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

/// How many pieces have their phase `phase_idx` (>= 1) before the first phase of piece g.
MOK_HD int32_t pieces_before(const ScheduleShape& shape, const Table& table, int32_t phase_idx, int32_t g) {
    if (g >= table.num_pieces) return table.num_pieces;
    int32_t low = 0, high = g > 0 ? g : 0;
    while (low < high) {
        const int32_t middle = low + (high - low) / 2;
        if (comes_before(shape, table, phase_idx, middle, g)) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/// Tasks of a phase over the first `pieces` pieces.
MOK_HD int64_t tasks_before(const ScheduleShape& shape, const Table& table, int32_t phase_idx,
                            int32_t pieces) {
    const PhaseRule& rule = shape.phases[phase_idx];
    if (rule.phase == Phase::kWgrad) {
        return static_cast<int64_t>(table.pieces[pieces].spans_before) * shape.routed.span_tiles();
    }
    int32_t blocks = table.pieces[pieces].begin;
    if (rule.skips_first) {
        const int32_t skipped = table.first_chunk_end();
        blocks = blocks > skipped ? blocks - skipped : 0;
    }
    return static_cast<int64_t>(blocks) * shape.routed.per_block(rule.phase);
}

/// Pull elements of a phase over the first `pieces` pieces.
MOK_HD int64_t pulls_before(const ScheduleShape& shape, const Table& table, int32_t phase_idx,
                            int32_t pieces) {
    const PhaseRule& rule = shape.phases[phase_idx];
    if (rule.pulls_first == Pulled::kNone && rule.pulls_later == Pulled::kNone) return 0;
    const int32_t units = table.unit_begin[pieces];
    int32_t first = units;
    if (table.pieces[pieces].chunk > 0) {
        first = table.unit_begin[table.num_chunks > 1 ? find_piece(table, table.chunks[1].begin)
                                                      : table.num_pieces];
    }
    int64_t counted = 0;
    if (rule.pulls_first != Pulled::kNone) counted += first;
    if (rule.pulls_later != Pulled::kNone) counted += units - first;
    return counted * shape.pull_pieces;
}

struct PlacedRun {
    int32_t index;
    Run run;
    int32_t before[kMaxPhases];  // pieces whose phase k comes before this run
};

/// The run of a phase over a piece and its place, but for its pulls; needs pieces. piece = num_pieces with
/// phase 0 is the sentinel.
MOK_HD PlacedRun place_run(const ScheduleShape& shape, const Table& table, int32_t piece, int32_t phase_idx) {
    const int32_t gap = follower(shape, table, phase_idx, piece);
    PlacedRun placed{0, Run{0, 0, piece, phase_idx}, {}};
    for (int32_t k = 0; k < shape.num_phases; ++k) {
        int32_t before = piece;
        if (k != phase_idx) {
            if (k == 0) {
                before = gap;
            } else {
                // Runs that share a gap are ordered by phase, the first phase last.
                const bool earlier = phase_idx == 0 || k < phase_idx;
                before = pieces_before(shape, table, k, earlier ? gap : gap - 1);
            }
        }
        placed.before[k] = before;
        placed.index += before;
        placed.run.task_begin += tasks_before(shape, table, k, before);
    }
    return placed;
}

/// Pull elements of the runs before one; needs unit_begin.
MOK_HD int64_t run_pulls(const ScheduleShape& shape, const Table& table, const int32_t* before) {
    int64_t pulls = 0;
    for (int32_t k = 0; k < shape.num_phases; ++k) pulls += pulls_before(shape, table, k, before[k]);
    return pulls;
}

}  // namespace mok::schedule
