// What pull warps fetch, in which order, and what they wait for.
//
// A unit is one distinct (source rank, token) of a chunk: it is fetched once and stored to all its rows of
// that chunk. A row travels in pieces; an element of the pull list is one piece of one unit. The list follows
// the runs of the task order; inside a piece of a segment, units are ordered by (window of row blocks of
// their first row, source rank counted from the own one, first row). Any pull warp takes the next elements
// from one counter, so a CTA that is not resident holds nothing back.
#pragma once

#include <cstdint>

#include "csrc/schedule/counters.h"

namespace mok::schedule {

/// A unit without source: zeros for the padding rows of a row block.
constexpr int32_t kZeroSource = -1;

struct PullUnit {
    int32_t peer;   // kZeroSource: no source
    int32_t token;  // at its home rank
};

/// The units of a call, in pull order. unit `u` fills rows[row_begin[u] .. row_begin[u + 1]), padded rows of
/// the plan in ascending order. Memory is the caller's.
struct PullUnits {
    const PullUnit* units;
    const int32_t* row_begin;  // [num_units + 1]
    const int32_t* rows;
    int32_t num_units;
};

/// Place of a unit's group within its piece of a segment: by window, then source.
MOK_HD int32_t pull_group(const ScheduleShape& shape, const Piece& piece, int32_t block, int32_t rank,
                          int32_t num_ranks, int32_t peer) {
    const int32_t window = (block - piece.begin) / shape.window_blocks;
    const int32_t turn = peer == kZeroSource ? 0 : (peer - rank + num_ranks) % num_ranks;
    return window * num_ranks + turn;
}

struct PullElement {
    Pulled what;
    int32_t unit;
    int32_t piece;  // of the row
    int32_t run;
};

/// Element `index` of the list, which lies in run `run_idx`.
MOK_HD PullElement pull_element(const ScheduleShape& shape, const Table& table, int32_t run_idx,
                                int64_t index) {
    const Run& run = table.runs[run_idx];
    const uint32_t local = static_cast<uint32_t>(index - run.pull_begin);
    const uint32_t pieces = static_cast<uint32_t>(shape.pull_pieces);
    return PullElement{shape.pulled(run.phase_idx, table.pieces[run.piece].chunk),
                       table.unit_begin[run.piece] + static_cast<int32_t>(local / pieces),
                       static_cast<int32_t>(local % pieces), run_idx};
}

/// Element `index` of the list, index < table.num_pulls. `run_hint` as in decode_task.
MOK_HD PullElement decode_pull(const ScheduleShape& shape, const Table& table, int64_t index,
                               int32_t& run_hint) {
    int32_t low = run_hint, high = table.num_runs;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (table.runs[middle].pull_begin <= index) {
            low = middle;
        } else {
            high = middle;
        }
    }
    run_hint = low;
    return pull_element(shape, table, low, index);
}

MOK_HD Counter pull_counter(Pulled what) {
    return what == Pulled::kX ? Counter::kX : Counter::kDout;
}

/// What must be done before a pull may store into a row of `block`: the readers of the row block that had its
/// ring slot. They come before every task of the chunk that the pull serves.
MOK_HD int32_t pull_waits(const ScheduleShape& shape, const Table& table, int32_t block,
                          Wait (&waits)[kMaxWaits]) {
    if (block < shape.ring_blocks) return 0;
    const int32_t before = block - shape.ring_blocks;
    const Piece& piece = table.pieces[table.reused_piece[before]];
    const int32_t index = counter_block(shape, false, before);
    const auto target = [&](Counter counter) {
        return block_final_value(shape, table, counter, false, piece.expert, piece.chunk, before);
    };
    if (!shape.backward()) {
        if (shape.saves_x(piece.chunk)) return 0;  // its x lies in the saved context
        waits[0] = Wait{Counter::kGateUp, index, index + 1, target(Counter::kGateUp)};
        return 1;
    }
    int32_t n = 0;
    if (shape.routed.per_block(Phase::kDx) > 0) {
        waits[n++] = Wait{Counter::kDxRead, index, index + 1, target(Counter::kDxRead)};
    }
    if (const int32_t tiles = shape.routed.span_tiles(); tiles > 0) {
        waits[n++] = Wait{Counter::kSpanRead, piece.spans_before, piece.spans_before + 1, tiles};
    }
    return n;
}

}  // namespace mok::schedule
