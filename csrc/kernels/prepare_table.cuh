// The table of a call (csrc/schedule/table.h), by one block while the others place routes and write units:
// chunks and pieces need the segments, runs need the pieces, and only the runs' pulls need the units.
#pragma once

#include "csrc/kernels/prepare_units.cuh"

namespace mok::prepare {

/// Whether all ranks mean the same call; a rank that differs is found by all, since each compares itself with
/// everyone. The first warp calls it. What differs ends the workspace: every later kernel leaves at once.
MOK_DEVICE void compare_headers(const Block& block) {
    const PeerGroup& group = block.params.group;
    for (uint32_t first = 0; first < block.ranks; first += ptx::kWarpThreads) {
        const uint32_t rank = first + block.lane;
        bool differs = false;
        if (rank < block.ranks) {
            const auto* ours = reinterpret_cast<const int64_t*>(&block.params.header);
            const auto* theirs = reinterpret_cast<const int64_t*>(call_header(group, rank));
#pragma unroll
            for (uint32_t word = kHeaderDataWords; word < kHeaderWords; ++word) {
                differs |= ptx::load_global(theirs + word) != ours[word];
            }
        }
        const uint32_t ranks = ptx::ballot(differs);
        if ((ranks >> block.lane & 1) != 0 && (ranks & ptx::lanes_before()) == 0) {
            report_mismatch(group, rank, block.params.header);
        }
    }
}

/// Where the ranks' inputs lie, and zeros where the megakernel counts its claims. Needs the first barrier
/// between ranks only.
MOK_DEVICE void write_ranks(const Block& block) {
    const PrepareParams& params = block.params;
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

/// The table as far as it is known: pointers, and what fill_chunks has counted.
MOK_DEVICE schedule::Table table_of(const Block& block) {
    const PrepareArrays& arrays = block.params.arrays;
    schedule::Table table{};
    table.chunks = arrays.chunks;
    table.pieces = arrays.pieces;
    table.runs = arrays.runs;
    table.unit_begin = arrays.unit_begin;
    table.idle_experts = arrays.idle_experts;
    table.segment_begin = arrays.segment_begin;
    table.counts = arrays.counts;
    return table;
}

/// The zero unit of each segment counts in the tile of its first padding row, where no later row of the
/// segment is valid. As pass 2 it adds to cleared counts.
MOK_DEVICE void count_zero_units(const Block& block) {
    const schedule::ScheduleShape& shape = block.params.shape;
    if (!block.params.pulls_any) return;
    for (uint32_t expert = block.thread; expert < block.experts; expert += block.threads()) {
        const uint32_t begin = Block::entry(block.shared.begin, expert);
        const uint32_t end = Block::entry(block.shared.begin, expert + 1);
        const uint32_t valid_end = begin + Block::entry(block.shared.total, expert);
        if (valid_end == end) continue;
        if (!shape.zeroes_padding(static_cast<int32_t>(chunk_of(block, expert, end - 1)))) continue;
        ptx::red_relaxed_gpu_add(block.params.arrays.tile_counts + valid_end / kTileRows,
                                 uint64_t{1} << 32 | (end - valid_end));
    }
}

/// Chunks, pieces, idle experts, and the runs but for their pulls. The whole block calls it.
MOK_DEVICE schedule::Table make_table(const Block& block) {
    const schedule::ScheduleShape& shape = block.params.shape;
    const PrepareArrays& arrays = block.params.arrays;
    schedule::Table table = table_of(block);
    ptx::sync_block();  // segment_begin and counts are written
    if (block.thread == 0) {
        schedule::fill_chunks(shape, table);
        block.set_word(SharedWord::kFoundChunks, static_cast<uint32_t>(table.num_chunks));
        block.set_word(SharedWord::kFoundBlocks, static_cast<uint32_t>(table.num_blocks));
    }
    ptx::sync_block();
    table.num_chunks = static_cast<int32_t>(block.word(SharedWord::kFoundChunks));
    table.num_blocks = static_cast<int32_t>(block.word(SharedWord::kFoundBlocks));
    schedule::PieceCount total{0, 0};
    for (uint32_t first = 0; first < block.experts; first += block.threads()) {
        const uint32_t expert = first + block.thread;
        const bool is_expert = expert < block.experts;
        const int32_t segment = static_cast<int32_t>(expert);
        schedule::PieceCount own{0, 0};
        if (is_expert) own = schedule::pieces_of_segment(shape, table, segment);
        const bool is_idle = is_expert && Block::entry(block.shared.total, expert) == 0;
        const Prefix pieces = block_prefix(block, static_cast<uint32_t>(own.pieces));
        const Prefix spans = block_prefix(block, static_cast<uint32_t>(own.spans));
        const Prefix idle = block_prefix(block, is_idle ? 1 : 0);
        if (own.pieces > 0) {
            schedule::fill_pieces(shape, table, segment,
                                  {total.pieces + static_cast<int32_t>(pieces.before),
                                   total.spans + static_cast<int32_t>(spans.before)});
        }
        if (is_idle) {
            ptx::store_global(arrays.idle_experts + table.num_idle + idle.before, segment);
        }
        total.pieces += static_cast<int32_t>(pieces.total);
        total.spans += static_cast<int32_t>(spans.total);
        table.num_idle += static_cast<int32_t>(idle.total);
    }
    table.num_pieces = total.pieces;
    table.num_runs = total.pieces * shape.num_phases;
    if (block.thread == 0) schedule::end_pieces(shape, table, total);
    ptx::sync_block();
    for (int32_t i = static_cast<int32_t>(block.thread); i < table.num_runs;
         i += static_cast<int32_t>(block.threads())) {
        const schedule::PlacedRun placed =
            schedule::place_run(shape, table, i / shape.num_phases, i % shape.num_phases);
        table.runs[placed.index] = placed.run;
        int32_t* before = arrays.run_before + static_cast<int64_t>(placed.index) * schedule::kMaxPhases;
#pragma unroll
        for (int32_t k = 0; k < schedule::kMaxPhases; ++k) ptx::store_global(before + k, placed.before[k]);
    }
    return table;
}

/// unit_begin, the runs' pulls and all totals, once the units of all tiles are counted. The whole block calls
/// it.
MOK_DEVICE void finish_table(const Block& block, schedule::Table table) {
    const schedule::ScheduleShape& shape = block.params.shape;
    const PrepareArrays& arrays = block.params.arrays;
    const uint32_t tiles = static_cast<uint32_t>(table.num_blocks) * (block.block_m / kTileRows);
    // Each thread sums a stretch of tiles; a piece adds those of the stretch in which it begins.
    const uint32_t per_thread = ceil_div(tiles, block.threads());
    UnitCount sum{0, 0};
    for (uint32_t i = 0; i < per_thread; ++i) {
        const uint32_t tile = block.thread * per_thread + i;
        if (tile < tiles) sum += tile_count(block, tile);
    }
    const Prefix units = block_prefix(block, sum.units);
    const UnitCount all = block_sum(block, sum);
    ptx::store_shared(block.shared.counters + 4 * block.thread, units.before);
    ptx::sync_block();
    for (uint32_t piece = block.thread; piece < static_cast<uint32_t>(table.num_pieces);
         piece += block.threads()) {
        const uint32_t tile = static_cast<uint32_t>(table.pieces[piece].begin) * (block.block_m / kTileRows);
        const uint32_t stretch = tile / per_thread;
        uint32_t before = Block::entry(block.shared.counters, stretch);
        for (uint32_t other = stretch * per_thread; other < tile; ++other) {
            before += tile_count(block, other).units;
        }
        ptx::store_global(arrays.unit_begin + piece, static_cast<int32_t>(before));
    }
    if (block.thread == 0) {
        ptx::store_global(arrays.unit_begin + table.num_pieces, static_cast<int32_t>(all.units));
        ptx::store_global(arrays.row_begin + all.units, static_cast<int32_t>(all.rows));
    }
    ptx::sync_block();
    for (int32_t i = static_cast<int32_t>(block.thread); i < table.num_runs;
         i += static_cast<int32_t>(block.threads())) {
        table.runs[i].pull_begin = schedule::run_pulls(
            shape, table, arrays.run_before + static_cast<int64_t>(i) * schedule::kMaxPhases);
    }
    if (block.thread != 0) return;
    for (int32_t k = 0; k < shape.num_phases; ++k) {
        table.num_shared_tasks += shape.shared_tasks(k);
        table.num_routed_tasks += schedule::tasks_before(shape, table, k, table.num_pieces);
        table.num_pulls += schedule::pulls_before(shape, table, k, table.num_pieces);
    }
    table.runs[table.num_runs] = schedule::Run{table.num_routed_tasks, table.num_pulls, table.num_pieces, 0};
    *arrays.table = table;
    *arrays.pulls =
        schedule::PullUnits{arrays.units, arrays.row_begin, arrays.rows, static_cast<int32_t>(all.units)};
}

/// Zeros for the megakernel's counters, by the blocks that have rounds. As many as any table over these rows
/// can need: the exact number is not known yet.
MOK_DEVICE void clear_counters(const Block& block, const Deal& deal) {
    const int64_t words = schedule::most_counters(block.params.shape, block.word(SharedWord::kTaskRows));
    const int64_t step = static_cast<int64_t>(deal.blocks) * block.threads();
    for (int64_t i = static_cast<int64_t>(ptx::block_idx()) * block.threads() + block.thread; i < words;
         i += step) {
        ptx::store_global(block.params.arrays.counters + i, 0u);
    }
}

}  // namespace mok::prepare
