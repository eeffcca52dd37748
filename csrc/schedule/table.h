// The prefix table of a call: chunks, pieces and runs, from which a task is decoded by its index.
//
// Every entry is a pure function of the plan's segments: the host fills the table in a loop, a device kernel
// with one thread per entry (csrc/kernels/prepare_table.cuh), and tests compare the two.
//   1. chunks    in order: each needs where the last one ended
//   2. pieces    pieces_of_segment() counts, a prefix sum places, fill_pieces() writes
//   3. units     the pull list counts its units per piece (pull.h)
//   4. runs      place_run() for each (piece, phase); it knows its place. run_pulls() adds what needs units
#pragma once

#include <cstdint>

#include "csrc/layout/plan.h"
#include "csrc/schedule/shape.h"

namespace mok::schedule {

/// Row blocks that are in the ring at one time.
struct Chunk {
    int32_t begin, end;   // row blocks
    int32_t cut_ordinal;  // of the cut segment's stretch that starts here, counted over the rank; -1: none
};

/// A stretch of one segment inside one chunk: what the order interleaves. Its span is all of the segment that
/// lies in the chunk: what a weight-gradient task sums over.
struct Piece {
    int32_t begin, end;  // row blocks; blocks are counted over the rank's padded rows
    int32_t expert;      // local
    int32_t chunk;
    int32_t span_begin;    // first row block of the span
    int32_t spans_before;  // spans that end in earlier pieces: also the index of this piece's own span
    bool ends_span;
};

/// Consecutive tasks of one phase over one piece.
struct Run {
    int64_t task_begin;  // counted from the first routed task
    int64_t pull_begin;  // pull elements of earlier runs
    int32_t piece;
    int32_t phase_idx;
};

/// Of so many row blocks those whose ring slots serve again: the first ones.
MOK_HD int64_t reused_blocks(const ScheduleShape& shape, int64_t num_blocks) {
    return num_blocks > shape.ring_blocks ? num_blocks - shape.ring_blocks : 0;
}

/// The arrays have one entry more than their count: a sentinel with the totals. Counters of memory that the
/// caller owns; a kernel takes it by value.
struct Table {
    Chunk* chunks;
    Piece* pieces;
    Run* runs;
    int32_t* unit_begin;           // [num_pieces + 1] pull units of earlier pieces
    int32_t* reused_piece;         // [num_reused()] the piece of a row block: what pulls look up
    int32_t* idle_experts;         // [num_idle] local experts without rows
    const int64_t* segment_begin;  // [E_local + 1], padded rows
    const int64_t* counts;         // [E_local], routes
    int32_t num_chunks;
    int32_t num_pieces;
    int32_t num_runs;
    int32_t num_idle;
    int32_t num_blocks;
    int64_t num_shared_tasks;
    int64_t num_routed_tasks;
    int64_t num_pulls;

    MOK_HD int32_t num_spans() const { return pieces[num_pieces].spans_before; }
    MOK_HD int32_t first_chunk_end() const { return num_chunks > 0 ? chunks[0].end : 0; }
    MOK_HD int32_t num_reused(const ScheduleShape& shape) const {
        return static_cast<int32_t>(reused_blocks(shape, num_blocks));
    }
};

/// Most entries that any routing can need, for allocation before the routing is known.
struct TableCapacity {
    int64_t chunks, pieces, runs, reused_blocks;
};

MOK_HD TableCapacity table_capacity(const ScheduleShape& shape, int64_t worst_rows) {
    const int64_t blocks = ceil_div<int64_t>(worst_rows, shape.block_m);
    // Two neighbouring chunks hold more than the ring, or the second would have fitted into the first.
    const int64_t chunks = 2 * ceil_div<int64_t>(blocks, shape.ring_blocks) + 1;
    const int64_t pieces = shape.sizes.num_local_experts + chunks + blocks / shape.max_piece_blocks;
    return TableCapacity{chunks, pieces, pieces * shape.num_phases, reused_blocks(shape, blocks)};
}

/// The chunk that starts at row block `begin`: mok::chunk_end by search instead of a walk.
MOK_HD int32_t chunk_end_block(const ScheduleShape& shape, const int64_t* segment_begin, int32_t begin) {
    const int32_t num_segments = shape.sizes.num_local_experts;
    const int64_t total = segment_begin[num_segments];
    const int64_t row = static_cast<int64_t>(begin) * shape.block_m;
    const int64_t limit = row + static_cast<int64_t>(shape.ring_blocks) * shape.block_m;
    if (limit >= total) return static_cast<int32_t>(total / shape.block_m);
    const int64_t cut = segment_begin[find_segment(limit, segment_begin, num_segments)];
    return static_cast<int32_t>((cut > row ? cut : limit) / shape.block_m);
}

/// Whether the segment that holds row block `begin` of a chunk's start lies in several chunks.
MOK_HD bool starts_cut(const ScheduleShape& shape, const int64_t* segment_begin, int32_t begin, int32_t end) {
    const int64_t row = static_cast<int64_t>(begin) * shape.block_m;
    const int32_t segment = find_segment(row, segment_begin, shape.sizes.num_local_experts);
    return segment_begin[segment] < row ||
           segment_begin[segment + 1] > static_cast<int64_t>(end) * shape.block_m;
}

/// Fills chunks and num_chunks, num_blocks; one thread.
MOK_HD void fill_chunks(const ScheduleShape& shape, Table& table) {
    table.num_blocks =
        static_cast<int32_t>(table.segment_begin[shape.sizes.num_local_experts] / shape.block_m);
    table.num_chunks = 0;
    int32_t cuts = 0;
    for (int32_t begin = 0; begin < table.num_blocks;) {
        const int32_t end = chunk_end_block(shape, table.segment_begin, begin);
        const bool cut = starts_cut(shape, table.segment_begin, begin, end);
        table.chunks[table.num_chunks++] = Chunk{begin, end, cut ? cuts++ : -1};
        begin = end;
        if (shape.sizes.pass == Pass::kRecompute) {
            table.num_blocks = end;
        }
    }
    table.chunks[table.num_chunks] = Chunk{table.num_blocks, table.num_blocks, cuts};
}

MOK_HD int32_t find_chunk(const Table& table, int32_t block) {
    int32_t low = 0, high = table.num_chunks;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (table.chunks[middle].begin <= block) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/// Calls `add(Piece)` for each piece of a segment, in order; spans_before counts from 0 within the segment.
template <typename Add>
MOK_HD void for_each_piece(const ScheduleShape& shape, const Table& table, int32_t segment, const Add& add) {
    const int32_t begin = static_cast<int32_t>(table.segment_begin[segment] / shape.block_m);
    int32_t end = static_cast<int32_t>(table.segment_begin[segment + 1] / shape.block_m);
    if (end > table.num_blocks) end = table.num_blocks;
    int32_t spans = 0;
    for (int32_t span = begin; span < end; ++spans) {
        const int32_t chunk = find_chunk(table, span);
        const int32_t span_end = end < table.chunks[chunk].end ? end : table.chunks[chunk].end;
        for (int32_t block = span; block < span_end;) {
            int32_t piece_end = block + shape.max_piece_blocks;
            if (piece_end > span_end) piece_end = span_end;
            add(Piece{block, piece_end, segment, chunk, span, spans, piece_end == span_end});
            block = piece_end;
        }
        span = span_end;
    }
}

struct PieceCount {
    int32_t pieces, spans;
};

MOK_HD PieceCount pieces_of_segment(const ScheduleShape& shape, const Table& table, int32_t segment) {
    PieceCount count{0, 0};
    for_each_piece(shape, table, segment, [&](const Piece& piece) {
        ++count.pieces;
        count.spans += piece.ends_span ? 1 : 0;
    });
    return count;
}

/// The entries of Table::reused_piece that are piece `index`.
MOK_HD void name_reused_blocks(int32_t* reused_piece, int32_t num_reused, const Piece& piece, int32_t index) {
    const int32_t end = piece.end < num_reused ? piece.end : num_reused;
    for (int32_t block = piece.begin; block < end; ++block) reused_piece[block] = index;
}

/// Writes a segment's pieces behind `before`, the sum of pieces_of_segment over the segments in front of it.
MOK_HD void fill_pieces(const ScheduleShape& shape, const Table& table, int32_t segment, PieceCount before) {
    int32_t next = before.pieces;
    for_each_piece(shape, table, segment, [&](Piece piece) {
        piece.spans_before += before.spans;
        name_reused_blocks(table.reused_piece, table.num_reused(shape), piece, next);
        table.pieces[next++] = piece;
    });
}

/// The sentinel behind the last piece.
MOK_HD void end_pieces(const ScheduleShape& shape, Table& table, PieceCount total) {
    table.num_pieces = total.pieces;
    table.num_runs = total.pieces * shape.num_phases;
    table.pieces[total.pieces] =
        Piece{table.num_blocks, table.num_blocks, -1, table.num_chunks, table.num_blocks, total.spans, false};
}

/// The piece that holds a row block.
MOK_HD int32_t find_piece(const Table& table, int32_t block) {
    int32_t low = 0, high = table.num_pieces;
    while (high - low > 1) {
        const int32_t middle = low + (high - low) / 2;
        if (table.pieces[middle].begin <= block) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

}  // namespace mok::schedule
