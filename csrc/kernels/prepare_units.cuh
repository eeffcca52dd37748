// Pass 3 of the preparation: pull units in pull order, from rows in row order, without a sort.
//
// A tile is 32 rows; pass 2 has counted its units (at their first rows) and the rows they fill. Inside a
// window of row blocks the rows of each source lie together, sources ascending, and pull order is that turned
// to begin with the own rank:
//
//   rows of the window    [ sources before | own rank | sources behind | padding ]
//   pull order            [ own rank | zeros for the padding | sources behind | sources before ]
//
// The zero unit counts as the own rank's last one. So a unit's place is the count of units before its window,
// plus those of the window whose turn comes earlier, plus those of its turn before it. A warp takes a tile:
// it looks at the counts of the window's tiles, one a lane, and needs no other warp.
#pragma once

#include "csrc/kernels/prepare_place.cuh"

namespace mok::prepare {

MOK_DEVICE void add(UnitCount& sum, const PackedCount& count) {
    sum.rows += count.rows();
    sum.units += count.units();
}

/// Adds all units of a tile.
MOK_DEVICE void add(UnitCount& sum, const TileCounts& counts) {
#pragma unroll
    for (const PackedCount& count : counts.turn) add(sum, count);
}

/// Sums over stretches of tiles, which a block keeps in shared memory.
struct TilePrefix {
    uint32_t stretch;  // tiles of one
    uint32_t units;    // shared: u32 [threads], units of earlier stretches
    uint32_t rows;     // and the rows that they fill
    UnitCount all;

    MOK_DEVICE UnitCount before(uint32_t index) const {
        return UnitCount{Block::entry(rows, index), Block::entry(units, index)};
    }
};

/// Each thread sums a stretch. The whole block calls it; the warps' counters are not needed any more.
template <typename Rows>
MOK_DEVICE TilePrefix scan_tiles(const Block& block, const Rows& rows_in) {
    const uint32_t tiles = block.word(SharedWord::kTaskRows) / kTileRows;
    const uint32_t stretch = ceil_div(tiles, block.threads());
    UnitCount sum{0, 0};
#pragma unroll 1
    for (uint32_t i = 0; i < stretch; ++i) {
        const uint32_t tile = block.thread * stretch + i;
        if (tile < tiles) add(sum, rows_in.counts(tile));
    }
    const Prefix<2> sums = block_prefix<2>(block, {sum.rows, sum.units});
    const uint32_t units = block.shared.counters, rows = units + 4 * block.threads();
    Block::set_entry(rows, block.thread, sums.before[0]);
    Block::set_entry(units, block.thread, sums.before[1]);
    ptx::sync_block();
    return TilePrefix{stretch, units, rows, UnitCount{sums.total[0], sums.total[1]}};
}

/// Rows [begin, end) in which units take turns, around a row, and the segment that holds it.
struct Window {
    uint32_t begin;
    uint32_t end;        // padding included
    uint32_t valid_end;  // of the segment
    uint32_t padding;    // rows that a zero unit of this window fills
};

/// `expert` is the one whose segment holds the row.
MOK_DEVICE Window window_of_row(const Block& block, uint32_t row, uint32_t expert, uint32_t valid_end) {
    const PrepareParams& params = block.params;
    const uint32_t segment = Block::entry(block.shared.begin, expert);
    const uint32_t segment_end = Block::entry(block.shared.begin, expert + 1);
    uint32_t begin = segment, end = segment_end;
    // Stretch of the ring, piece, window: each cut from its begin on, the last one short.
    const Divisor* const cuts[] = {&params.ring_rows, &params.piece_rows, &params.window_rows};
#pragma unroll
    for (const Divisor* cut : cuts) {
        begin += cut->round_down(row - begin);
        if (end > begin + cut->divisor) end = begin + cut->divisor;
    }
    const bool is_first_chunk =
        Block::entry(block.shared.chunk, expert) == 0 && row - segment < params.ring_rows.divisor;
    const bool has_zeros = end == segment_end && (is_first_chunk ? params.zeroes_first : params.zeroes_later);
    return Window{begin, end, valid_end, has_zeros ? segment_end - valid_end : 0};
}

MOK_DEVICE void write_unit(const Block& block, const UnitCount& place, int32_t peer, uint32_t token) {
    const PrepareArrays& arrays = block.params.arrays;
    ptx::store_global(arrays.units + place.units, schedule::PullUnit{peer, static_cast<int32_t>(token)});
    ptx::store_global(arrays.row_begin + place.units, static_cast<int32_t>(place.rows));
}

/// The zero unit of a window: the own rank's last one.
MOK_DEVICE void write_zeros(const Block& block, const Window& window, const UnitCount& before,
                            const PackedCount& own) {
    const UnitCount place{before.rows + own.rows() - window.padding, before.units + own.units() - 1};
    if (block.lane == 0) write_unit(block, place, schedule::kZeroSource, 0);
#pragma unroll 1
    for (uint32_t i = block.lane; i < window.padding; i += ptx::kWarpThreads) {
        ptx::store_global(block.params.arrays.rows + place.rows + i,
                          static_cast<int32_t>(window.valid_end + i));
    }
}

/// The rows of each lane's unit (count 0: none), from its token's on.
template <typename Rows>
MOK_DEVICE void write_rows(const Block& block, const Rows& rows_in, const RowRecord& record, uint32_t token,
                           uint32_t count, uint32_t place) {
    constexpr uint32_t kAtATime = 4;
    const uint32_t from = token * block.params.top_k.divisor + record.index();
    int32_t* to = block.params.arrays.rows + place;
#pragma unroll 1
    for (uint32_t first = 0; first < count; first += kAtATime) {
        uint32_t rows[kAtATime];
#pragma unroll
        for (uint32_t i = 0; i < kAtATime; ++i) {
            if (first + i < count) rows[i] = rows_in.token_row(record.peer(), from + first + i);
        }
#pragma unroll
        for (uint32_t i = 0; i < kAtATime; ++i) {
            if (first + i < count) ptx::store_global(to + first + i, static_cast<int32_t>(rows[i]));
        }
    }
}

/// One warp: the plan's rows of a tile, and the units whose first rows lie in it.
template <typename Rows>
MOK_DEVICE void write_tile(const Block& block, const Rows& rows_in, uint32_t tile, const TilePrefix& prefix) {
    const PrepareParams& params = block.params;
    const PrepareArrays& arrays = params.arrays;
    const uint32_t tile_row = tile * kTileRows, row = tile_row + block.lane;
    RowRecord record = rows_in.record(row);  // of padding: anything
    const uint32_t expert = last_at_most(block.shared.begin, block.experts, tile_row);
    const uint32_t valid_end =
        Block::entry(block.shared.begin, expert) + Block::entry(block.shared.total, expert);
    const bool is_valid = row < valid_end;
    if (!is_valid) record = RowRecord{0, 0};
    ptx::store_global(arrays.row_peer + row, is_valid ? static_cast<int32_t>(record.peer()) : -1);
    ptx::store_global(arrays.row_slot + row, is_valid ? static_cast<int32_t>(record.slot) : -1);
    const uint32_t count = record.count();
    const uint32_t firsts = ptx::ballot(count > 0);
    const bool may_have_zeros = (params.zeroes_first || params.zeroes_later) && tile == valid_end / kTileRows;
    if (firsts == 0 && !may_have_zeros) return;
    if (!params.pulls_any || tile_row >= block.word(SharedWord::kTaskRows)) return;
    const Window window = window_of_row(block, tile_row, expert, valid_end);
    const bool has_zeros = window.padding > 0 && tile == valid_end / kTileRows;

    // Sums over the tiles from the window's stretch on: those before the window, the window's, and of these
    // those before this one.
    const uint32_t first = window.begin / kTileRows, end = window.end / kTileRows;
    const uint32_t stretch = first / prefix.stretch;
    UnitCount before{0, 0};
    uint32_t all[2] = {0, 0}, earlier[kTurns] = {0, 0, 0};
#pragma unroll 1
    for (uint32_t other = stretch * prefix.stretch + block.lane; other < end; other += ptx::kWarpThreads) {
        const TileCounts counts = rows_in.counts(other);
        if (other < first) {
            add(before, counts);
            continue;
        }
#pragma unroll
        for (uint32_t turn = 0; turn < kTurns; ++turn) {
            if (turn < 2) all[turn] += counts.turn[turn].word;
            if (other < tile) earlier[turn] += counts.turn[turn].word;
        }
    }
    const UnitCount base = prefix.before(stretch);
    before = UnitCount{base.rows + ptx::reduce_add(before.rows), base.units + ptx::reduce_add(before.units)};
    const PackedCount own{ptx::reduce_add(all[0])}, behind{ptx::reduce_add(all[1])};
    if (has_zeros) write_zeros(block, window, before, own);

    // Lanes of one source lie together: their sum ends where that of the earlier lanes begins.
    const Turn turn = turn_of(block, record.peer());
    uint32_t turn_lanes = 0;
    UnitCount place = before;
#pragma unroll
    for (uint32_t t = 0; t < kTurns; ++t) {
        const uint32_t lanes = ptx::ballot(is_valid && static_cast<uint32_t>(turn) == t);
        const PackedCount same{ptx::reduce_add(earlier[t])};
        if (static_cast<uint32_t>(turn) == t) {
            turn_lanes = lanes;
            add(place, same);
        }
    }
    if (turn != Turn::kOwn) add(place, own);
    if (turn == Turn::kBefore) add(place, behind);
    const uint32_t rows_before = ptx::inclusive_sum(count, block.lane) - count;
    const uint32_t first_lane = ptx::popcount((turn_lanes & (~turn_lanes + 1)) - 1);
    place.rows += rows_before - ptx::shuffle(rows_before, first_lane % ptx::kWarpThreads);
    place.units += ptx::popcount(firsts & turn_lanes & ptx::lanes_before());
    const uint32_t token = params.top_k.divide(record.slot);
    if (count > 0) write_unit(block, place, static_cast<int32_t>(record.peer()), token);
    write_rows(block, rows_in, record, token, count, place.rows);
}

/// Units are many where tokens have their first rows, so neighbouring tiles go to different blocks.
template <typename Rows>
MOK_DEVICE void write_units(const Block& block, const Rows& rows, const Deal& deal) {
    const uint32_t tiles = block.word(SharedWord::kRows) / kTileRows;
    const TilePrefix prefix = scan_tiles(block, rows);
#pragma unroll 1
    for (uint32_t tile = ptx::block_idx() + deal.blocks * block.warp; tile < tiles;
         tile += deal.blocks * block.warps) {
        write_tile(block, rows, tile, prefix);
    }
}

}  // namespace mok::prepare
