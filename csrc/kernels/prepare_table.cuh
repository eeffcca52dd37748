// The table of a call (csrc/schedule/table.h), by one block while the others place routes and write units:
// pieces need the segments, runs need the pieces, and only the runs' pulls need the units. A thread an entry;
// chunks are find_chunks'.
#pragma once

#include "csrc/kernels/prepare_units.cuh"

namespace mok::prepare {

/// Whether all ranks mean the same call; a rank that differs is found by all, since each compares itself with
/// everyone. One warp calls it. What differs ends the workspace: every later kernel leaves at once.
MOK_DEVICE void compare_headers(const Block& block) {
    const PrepareParams& params = block.params;
    const auto* ours = reinterpret_cast<const int64_t*>(&params.published.header);
#pragma unroll 1
    for (uint32_t rank = 0; rank < block.ranks; ++rank) {
        bool differs = false;
        if (block.lane >= kHeaderDataWords && block.lane < kHeaderWords) {
            const auto* theirs = reinterpret_cast<const int64_t*>(call_header(params.group, rank));
            differs = ptx::load_global(theirs + block.lane) != ours[block.lane];
        }
        if (!ptx::any_lane(differs)) continue;
        if (block.lane == 0) report_mismatch(params.group, rank, params.published.header);
        return;
    }
}

/// Where the ranks' inputs lie, and zeros where the megakernel counts its claims. Needs the first barrier
/// between ranks only.
MOK_DEVICE void write_ranks(const Block& block) {
    const PrepareParams& params = block.params;
#pragma unroll 1
    for (uint32_t rank = block.thread; rank < block.ranks; rank += block.threads()) {
        schedule::RankInputs inputs{params.own_x, params.own_dout, params.own_x_stride,
                                    params.own_dout_stride, num_tokens_of(block, rank)};
        if (block.ranks > 1) {
            const char* window = window_of(params.group, rank);
            const CallHeader* header = call_header(params.group, rank);
            inputs.x = window + ptx::load_global(&header->x_offset);
            inputs.dout = window + ptx::load_global(&header->dout_offset);
            inputs.x_stride = inputs.dout_stride = params.row_bytes;
        }
        params.arrays.ranks[rank] = inputs;
    }
    if (block.thread < 2) ptx::store_global(params.arrays.claims + block.thread * kClaimStride, 0u);
}

/// The zero unit of each segment counts as an own one in the tile of its first padding row, where no later
/// row of the segment is valid. Like those of pass 2 it is added to cleared counts.
template <typename Rows>
MOK_DEVICE void count_zero_units(const Block& block, const Rows& rows) {
    const PrepareParams& params = block.params;
    if (!params.pulls_any || !(params.zeroes_first || params.zeroes_later)) return;
#pragma unroll 1
    for (uint32_t expert = block.thread; expert < block.experts; expert += block.threads()) {
        const uint32_t end = Block::entry(block.shared.begin, expert + 1);
        const uint32_t valid_end =
            Block::entry(block.shared.begin, expert) + Block::entry(block.shared.total, expert);
        if (valid_end == end) continue;
        if (!(chunk_of(block, expert, end - 1) == 0 ? params.zeroes_first : params.zeroes_later)) continue;
        rows.add_unit(valid_end / kTileRows, Turn::kOwn, end - valid_end);
    }
}

/// The table as it will be, but for unit_begin, pulls and reused_piece.
MOK_DEVICE schedule::Table table_of(const Block& block, uint32_t num_pieces, uint32_t num_idle) {
    const PrepareParams& params = block.params;
    const PrepareArrays& arrays = params.arrays;
    schedule::Table table{};
    table.chunks = arrays.chunks;
    table.pieces = arrays.pieces;
    table.runs = arrays.runs;
    table.unit_begin = arrays.unit_begin;
    table.idle_experts = arrays.idle_experts;
    table.segment_begin = arrays.segment_begin;
    table.counts = arrays.counts;
    const uint32_t chunks = block.word(SharedWord::kChunks);
    table.num_chunks = static_cast<int32_t>(params.is_recompute && chunks > 1 ? 1 : chunks);
    table.num_pieces = static_cast<int32_t>(num_pieces);
    table.num_runs = table.num_pieces * params.shape.num_phases;
    table.num_idle = static_cast<int32_t>(num_idle);
    table.num_blocks = static_cast<int32_t>(params.block_rows.divide(block.word(SharedWord::kTaskRows)));
    table.num_shared_tasks = params.shared_tasks;
    return table;
}

/// Rows of a segment that have tasks.
MOK_DEVICE uint32_t task_rows_of(const Block& block, uint32_t expert) {
    const uint32_t limit = block.word(SharedWord::kTaskRows);
    const uint32_t begin = Block::entry(block.shared.begin, expert);
    const uint32_t end = Block::entry(block.shared.begin, expert + 1);
    return (end < limit ? end : limit) - (begin < limit ? begin : limit);
}

/// Piece `index`, from how many pieces and spans earlier segments have.
MOK_DEVICE schedule::Piece piece_at(const Block& block, uint32_t index) {
    const PrepareParams& params = block.params;
    const auto blocks = [&](uint32_t rows) { return static_cast<int32_t>(params.block_rows.divide(rows)); };
    const uint32_t expert = last_at_most(block.shared.base, block.experts, index);
    const uint32_t begin = Block::entry(block.shared.begin, expert);
    const uint32_t end = begin + task_rows_of(block, expert);
    const uint32_t local = index - Block::entry(block.shared.base, expert);
    const uint32_t stretch = params.stretch_pieces.divide(local);
    const uint32_t span = begin + stretch * params.ring_rows.divisor;
    const uint32_t span_end = end < span + params.ring_rows.divisor ? end : span + params.ring_rows.divisor;
    const uint32_t rows = params.piece_rows.divisor;
    const uint32_t piece = span + params.stretch_pieces.remainder(local) * rows;
    const uint32_t piece_end = span_end < piece + rows ? span_end : piece + rows;
    return schedule::Piece{blocks(piece),
                           blocks(piece_end),
                           static_cast<int32_t>(expert),
                           static_cast<int32_t>(Block::entry(block.shared.chunk, expert) + stretch),
                           blocks(span),
                           static_cast<int32_t>(Block::entry(block.shared.counters, expert) + stretch),
                           piece_end == span_end};
}

/// Pieces and idle experts. The whole block calls it.
MOK_DEVICE schedule::Table make_table(const Block& block) {
    const PrepareParams& params = block.params;
    const PrepareArrays& arrays = params.arrays;
    uint32_t pieces = 0, spans = 0, idle = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < block.experts; first += block.threads()) {
        const uint32_t expert = first + block.thread;
        const bool is_expert = expert < block.experts;
        const uint32_t rows = is_expert ? task_rows_of(block, expert) : 0;
        const uint32_t full = rows > 0 ? params.ring_rows.divide(rows - 1) : 0;  // stretches before the last
        const uint32_t rest = rows - full * params.ring_rows.divisor;
        const uint32_t own_pieces = full * params.stretch_pieces.divisor + params.piece_rows.divide_up(rest);
        const bool is_idle = is_expert && Block::entry(block.shared.total, expert) == 0;
        // Behind it the other warps are done with base and counters, too.
        const Prefix<3> sums =
            block_prefix<3>(block, {own_pieces, rows > 0 ? full + 1 : 0, is_idle ? 1u : 0u});
        if (is_expert) {
            Block::set_entry(block.shared.base, expert, pieces + sums.before[0]);
            Block::set_entry(block.shared.counters, expert, spans + sums.before[1]);
        }
        if (is_idle) {
            ptx::store_global(arrays.idle_experts + idle + sums.before[2], static_cast<int32_t>(expert));
        }
        pieces += sums.total[0];
        spans += sums.total[1];
        idle += sums.total[2];
    }
    const schedule::Table table = table_of(block, pieces, idle);
    ptx::sync_block();
#pragma unroll 1
    for (uint32_t index = block.thread; index < pieces; index += block.threads()) {
        arrays.pieces[index] = piece_at(block, index);
    }
    if (block.thread == 0) {
        const int32_t blocks = table.num_blocks;
        arrays.pieces[pieces] =
            schedule::Piece{blocks, blocks, -1, table.num_chunks, blocks, static_cast<int32_t>(spans), false};
        arrays.chunks[table.num_chunks] =
            schedule::Chunk{blocks, blocks, static_cast<int32_t>(block.word(SharedWord::kCuts))};
    }
    ptx::sync_block();
    return table;
}

/// The runs but for their pulls, with the sentinel: phase 0 of the piece behind the last.
MOK_DEVICE void place_runs(const Block& block, const schedule::Table& table) {
    const PrepareParams& params = block.params;
    const PrepareArrays& arrays = params.arrays;
    const int32_t num_reused = table.num_reused(params.shape);
    // With them all lines that the searches below step through come to this multiprocessor at once.
#pragma unroll 1
    for (uint32_t index = block.thread; index < static_cast<uint32_t>(table.num_pieces);
         index += block.threads()) {
        schedule::name_reused_blocks(arrays.reused_piece, num_reused, arrays.pieces[index],
                                     static_cast<int32_t>(index));
    }
#pragma unroll 1
    for (uint32_t i = block.thread; i <= static_cast<uint32_t>(table.num_runs); i += block.threads()) {
        const uint32_t phases = static_cast<uint32_t>(params.shape.num_phases);
        const uint32_t piece = i / phases;
        const schedule::PlacedRun placed = schedule::place_run(
            params.shape, table, static_cast<int32_t>(piece), static_cast<int32_t>(i - piece * phases));
        arrays.runs[placed.index] = placed.run;
        int32_t* before = arrays.run_before + static_cast<int64_t>(placed.index) * schedule::kMaxPhases;
#pragma unroll
        for (int32_t k = 0; k < schedule::kMaxPhases; ++k) ptx::store_global(before + k, placed.before[k]);
    }
}

/// Runs, unit_begin, the runs' pulls and all totals, once the units of all tiles are counted and the pieces
/// are written. The whole block calls it.
template <typename Rows>
MOK_DEVICE void finish_table(const Block& block, const Rows& rows, schedule::Table table) {
    const PrepareParams& params = block.params;
    const PrepareArrays& arrays = params.arrays;
    const uint32_t tiles_per_block = params.block_rows.divisor / kTileRows;
    place_runs(block, table);
    const TilePrefix prefix = scan_tiles(block, rows);
#pragma unroll 1
    for (uint32_t piece = block.thread; piece <= static_cast<uint32_t>(table.num_pieces);
         piece += block.threads()) {
        const uint32_t tile = static_cast<uint32_t>(arrays.pieces[piece].begin) * tiles_per_block;
        UnitCount before = prefix.all;
        if (piece < static_cast<uint32_t>(table.num_pieces)) {
            const uint32_t stretch = tile / prefix.stretch;
            before = prefix.before(stretch);
#pragma unroll 1
            for (uint32_t other = stretch * prefix.stretch; other < tile; ++other) {
                add(before, rows.counts(other));
            }
        }
        ptx::store_global(arrays.unit_begin + piece, static_cast<int32_t>(before.units));
    }
    if (block.thread == 0) {
        ptx::store_global(arrays.row_begin + prefix.all.units, static_cast<int32_t>(prefix.all.rows));
    }
    ptx::sync_block();
#pragma unroll 1
    for (int32_t i = static_cast<int32_t>(block.thread); i <= table.num_runs;
         i += static_cast<int32_t>(block.threads())) {
        schedule::Run& run = table.runs[i];
        run.pull_begin = schedule::run_pulls(
            params.shape, table, arrays.run_before + static_cast<int64_t>(i) * schedule::kMaxPhases);
        if (i < table.num_runs) continue;
        table.num_routed_tasks = run.task_begin;
        table.num_pulls = run.pull_begin;
        table.reused_piece = arrays.reused_piece;
        *arrays.table = table;
        *arrays.pulls = schedule::PullUnits{arrays.units, arrays.row_begin, arrays.rows,
                                            static_cast<int32_t>(prefix.all.units)};
    }
}

/// Zeros for the megakernel's counters, by the blocks that have rounds: at least as many as it has.
MOK_DEVICE void clear_counters(const Block& block, const Deal& deal) {
    const PrepareParams& params = block.params;
    const uint32_t blocks = params.block_rows.divide(block.word(SharedWord::kTaskRows));
    const uint32_t words = blocks * kCountersPerBlock + params.more_counters;
    const uint32_t step = deal.blocks * block.threads();
#pragma unroll 1
    for (uint32_t i = ptx::block_idx() * block.threads() + block.thread; i < words; i += step) {
        ptx::store_global(params.arrays.counters + i, 0u);
    }
}

}  // namespace mok::prepare
