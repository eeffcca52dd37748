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

MOK_DEVICE TileCount tile_count(const Block& block, uint32_t tile) {
    return TileCount{ptx::ld_relaxed_gpu(block.params.arrays.tile_counts + tile)};
}

MOK_DEVICE void add(UnitCount& sum, const PackedCount& count) {
    sum.rows += count.rows();
    sum.units += count.units();
}

/// Adds all units of a tile.
MOK_DEVICE void add(UnitCount& sum, const TileCount& count) {
#pragma unroll
    for (uint32_t turn = 0; turn < kTurns; ++turn) add(sum, count.of(turn));
}

/// The sum over the block's threads of the counts of tiles [begin, end). The whole block calls it.
MOK_DEVICE UnitCount sum_tiles(const Block& block, uint32_t begin, uint32_t end) {
    UnitCount sum{0, 0};
#pragma unroll 1
    for (uint32_t tile = begin + block.thread; tile < end; tile += block.threads()) {
        add(sum, tile_count(block, tile));
    }
    const uint32_t sums = block.shared.warp_sums;
    const UnitCount in_warp{ptx::reduce_add(sum.rows), ptx::reduce_add(sum.units)};
    if (block.lane == 0) {
        Block::set_entry(sums, block.warp, in_warp.rows);
        Block::set_entry(sums, kPrepareMaxWarps + block.warp, in_warp.units);
    }
    ptx::sync_block();
    const bool is_warp = block.lane < block.warps;
    return UnitCount{ptx::reduce_add(is_warp ? Block::entry(sums, block.lane) : 0),
                     ptx::reduce_add(is_warp ? Block::entry(sums, kPrepareMaxWarps + block.lane) : 0)};
}

/// Rows [begin, end) in which units take turns, around a row, and the segment that holds it.
struct Window {
    uint32_t begin;
    uint32_t end;        // padding included
    uint32_t valid_end;  // of the segment
    uint32_t padding;    // rows that a zero unit of this window fills
};

MOK_DEVICE Window window_of_row(const Block& block, uint32_t row) {
    const PrepareParams& params = block.params;
    const uint32_t expert = last_at_most(block.shared.begin, block.experts, row);
    const uint32_t segment = Block::entry(block.shared.begin, expert);
    const uint32_t segment_end = Block::entry(block.shared.begin, expert + 1);
    const uint32_t valid_end = segment + Block::entry(block.shared.total, expert);
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
MOK_DEVICE void write_rows(const Block& block, const RowRecord& record, uint32_t token, uint32_t count,
                           uint32_t place) {
    constexpr uint32_t kAtATime = 4;
    const PrepareArrays& arrays = block.params.arrays;
    const int32_t* from = arrays.token_rows + slots_of(block, record.peer()) +
                          token * block.params.top_k.divisor + record.index();
#pragma unroll 1
    for (uint32_t first = 0; first < count; first += kAtATime) {
        int32_t rows[kAtATime];
#pragma unroll
        for (uint32_t i = 0; i < kAtATime; ++i) {
            if (first + i < count) rows[i] = ptx::load_global(from + first + i);
        }
#pragma unroll
        for (uint32_t i = 0; i < kAtATime; ++i) {
            if (first + i < count) ptx::store_global(arrays.rows + place + first + i, rows[i]);
        }
    }
}

/// One warp: the plan's rows of a tile, and the units whose first rows lie in it. `base` counts the units of
/// tiles before `base_tile`, which is not behind this one.
MOK_DEVICE void write_tile(const Block& block, uint32_t tile, uint32_t base_tile, const UnitCount& base) {
    const PrepareArrays& arrays = block.params.arrays;
    const uint32_t tile_row = tile * kTileRows, row = tile_row + block.lane;
    const uint64_t words = ptx::load_global(arrays.records + row);  // of padding: anything
    const Window window = window_of_row(block, tile_row);
    const bool is_valid = row < window.valid_end;
    RowRecord record{static_cast<uint32_t>(words), static_cast<uint32_t>(words >> 32)};
    if (!is_valid) record = RowRecord{0, 0};
    ptx::store_global(arrays.row_peer + row, is_valid ? static_cast<int32_t>(record.peer()) : -1);
    ptx::store_global(arrays.row_slot + row, is_valid ? static_cast<int32_t>(record.slot) : -1);
    const uint32_t count = record.count();
    const uint32_t firsts = ptx::ballot(count > 0);
    const bool has_zeros = window.padding > 0 && tile == window.valid_end / kTileRows;
    if (firsts == 0 && !has_zeros) return;
    if (!block.params.pulls_any || tile_row >= block.word(SharedWord::kTaskRows)) return;

    // Sums over the tiles between base_tile and the window, and over the window's: all, and those before
    // this.
    const uint32_t first = window.begin / kTileRows, end = window.end / kTileRows;
    UnitCount before{0, 0};
    uint32_t all[2] = {0, 0}, earlier[kTurns] = {0, 0, 0};
#pragma unroll 1
    for (uint32_t other = (base_tile < first ? base_tile : first) + block.lane; other < end;
         other += ptx::kWarpThreads) {
        const TileCount counts = tile_count(block, other);
        if (other < first) {
            add(before, counts);
            continue;
        }
#pragma unroll
        for (uint32_t turn = 0; turn < kTurns; ++turn) {
            const PackedCount packed = counts.of(turn);
            if (turn < 2) all[turn] += packed.word;
            if (other < tile) earlier[turn] += packed.word;
            if (other < base_tile) {
                before.rows -= packed.rows();
                before.units -= packed.units();
            }
        }
    }
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
    const uint32_t token = block.params.top_k.divide(record.slot);
    if (count > 0) write_unit(block, place, static_cast<int32_t>(record.peer()), token);
    write_rows(block, record, token, count, place.rows);
}

/// A block's tiles lie together, and so do a warp's.
MOK_DEVICE void write_units(const Block& block, const Deal& deal) {
    const uint32_t tiles = block.word(SharedWord::kRows) / kTileRows;
    const uint32_t per_warp = ceil_div(tiles, deal.blocks * block.warps);
    const uint32_t begin = ptx::block_idx() * per_warp * block.warps;
    if (begin >= tiles) return;
    const UnitCount base = sum_tiles(block, 0, begin);
    const uint32_t first = begin + block.warp * per_warp;
#pragma unroll 1
    for (uint32_t tile = first; tile < first + per_warp && tile < tiles; ++tile) {
        write_tile(block, tile, begin, base);
    }
}

}  // namespace mok::prepare
