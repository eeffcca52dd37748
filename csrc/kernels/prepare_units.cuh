// Pass 3 of the preparation: pull units in pull order, from rows in row order, without a sort.
//
// A tile is 32 rows; pass 2 has counted its units (at their first rows) and the rows they fill. Inside a
// window of row blocks the rows of each source lie together, sources ascending, and pull order is that turned
// to begin with the own rank:
//
//   rows of the window    [ sources before | own rank | sources behind | padding ]
//   pull order            [ own rank | zeros for the padding | sources behind | sources before ]
//
// So a unit's place is the count of units before its window, plus that of units before it in its window, plus
// a shift that depends on its part only. A warp takes a tile: it counts the window's tiles, one a lane, and
// needs no other warp.
#pragma once

#include "csrc/kernels/prepare_place.cuh"

namespace mok::prepare {

MOK_DEVICE UnitCount& operator+=(UnitCount& sum, const UnitCount& value) {
    sum.rows += value.rows;
    sum.units += value.units;
    return sum;
}
MOK_DEVICE UnitCount operator+(UnitCount sum, const UnitCount& value) {
    return sum += value;
}
MOK_DEVICE UnitCount operator-(const UnitCount& sum, const UnitCount& value) {
    return UnitCount{sum.rows - value.rows, sum.units - value.units};
}
MOK_DEVICE UnitCount over_lanes(const UnitCount& value) {
    return UnitCount{ptx::reduce_add(value.rows), ptx::reduce_add(value.units)};
}

MOK_DEVICE UnitCount tile_count(const Block& block, uint32_t tile) {
    const uint64_t word = ptx::ld_relaxed_gpu(block.params.arrays.tile_counts + tile);
    return UnitCount{static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32)};
}

MOK_DEVICE RowRecord load_record(const Block& block, uint32_t row) {
    const uint64_t word = ptx::load_global(block.params.arrays.records + row);
    return RowRecord{static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32)};
}

/// The last segment that begins at or before `row`: the one with rows that holds it.
MOK_DEVICE uint32_t expert_of_row(const Block& block, uint32_t row) {
    uint32_t low = 0, high = block.experts;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        if (Block::entry(block.shared.begin, middle) <= row) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

/// Rows [begin, end) in which a tile's units take their places, and the segment around them.
struct Window {
    uint32_t expert;
    uint32_t begin;
    uint32_t end;        // padding included
    uint32_t valid_end;  // of the segment
    uint32_t padding;    // rows that a zero unit of this window fills
};

MOK_DEVICE Window window_of_row(const Block& block, uint32_t row) {
    const schedule::ScheduleShape& shape = block.params.shape;
    const uint32_t ring = ring_rows(block);
    const uint32_t blocks = ring / block.block_m;
    const auto at_most = [&](int32_t count) {
        return (static_cast<uint32_t>(count) < blocks ? static_cast<uint32_t>(count) : blocks) *
               block.block_m;
    };
    const auto cut = [&](uint32_t begin, uint32_t rows) { return begin + (row - begin) / rows * rows; };
    const auto least = [](uint32_t a, uint32_t b) { return a < b ? a : b; };
    const uint32_t expert = expert_of_row(block, row);
    const uint32_t begin = Block::entry(block.shared.begin, expert);
    const uint32_t end = Block::entry(block.shared.begin, expert + 1);
    const uint32_t span = cut(begin, ring);
    const uint32_t span_end = least(end, span + ring);
    const uint32_t piece_rows = at_most(shape.max_piece_blocks);
    const uint32_t piece = cut(span, piece_rows);
    const uint32_t piece_end = least(span_end, piece + piece_rows);
    const uint32_t window_rows = at_most(shape.window_blocks);
    const uint32_t window = cut(piece, window_rows);
    const uint32_t window_end = least(piece_end, window + window_rows);
    const uint32_t valid_end = begin + Block::entry(block.shared.total, expert);
    const uint32_t chunk = Block::entry(block.shared.chunk, expert) + (span - begin) / ring;
    const bool has_zeros = window_end == end && shape.zeroes_padding(static_cast<int32_t>(chunk));
    return Window{expert, window, window_end, valid_end, has_zeros ? end - valid_end : 0};
}

/// A row of the segment, or where the window's valid rows begin or end if it lies outside.
MOK_DEVICE uint32_t clamp_to_window(const Window& window, uint32_t row) {
    const uint32_t end = window.end < window.valid_end ? window.end : window.valid_end;
    return row < window.begin ? window.begin : row < end ? row : end;
}

/// Units in the rows of `row`'s tile before it.
MOK_DEVICE UnitCount count_in_tile(const Block& block, uint32_t row) {
    UnitCount count{0, 0};
    if (row % kTileRows != 0) {
        const uint32_t own = row / kTileRows * kTileRows + block.lane;
        if (own < row) count.rows = load_record(block, own).count();
        count.units = count.rows > 0 ? 1 : 0;
    }
    return over_lanes(count);
}

/// Unit counts around a tile: before its window (given those before tile `base_tile`, which is not behind
/// it), and inside the window before the tile, before two rows of it, and in all.
struct WindowCounts {
    UnitCount before_window;
    UnitCount before_tile;
    UnitCount before_own;     // sources before the own rank
    UnitCount before_others;  // and the own rank
    UnitCount all;
};

MOK_DEVICE WindowCounts count_window(const Block& block, const Window& window, uint32_t tile,
                                     uint32_t base_tile, const UnitCount& base) {
    const bool turns = block.ranks > 1;
    uint32_t own = window.begin, others = window.end;
    if (turns) {
        const uint32_t* own_rows = block.params.arrays.own_rows + window.expert;
        own = clamp_to_window(window, ptx::load_global(own_rows));
        others = clamp_to_window(window, ptx::load_global(own_rows + block.experts));
    }
    const uint32_t first = window.begin / kTileRows, end = window.end / kTileRows;
    WindowCounts counts{};
    UnitCount skipped{0, 0}, shared{0, 0};  // between base_tile and the window, on either side
    for (uint32_t other = base_tile + block.lane; other < first; other += ptx::kWarpThreads) {
        skipped += tile_count(block, other);
    }
    for (uint32_t other = first + block.lane; other < end; other += ptx::kWarpThreads) {
        const UnitCount count = tile_count(block, other);
        counts.all += count;
        if (other < tile) counts.before_tile += count;
        if (other < base_tile) shared += count;
        if (other < own / kTileRows) counts.before_own += count;
        if (other < others / kTileRows) counts.before_others += count;
    }
    counts.before_window = base + over_lanes(skipped) - over_lanes(shared);
    counts.before_tile = over_lanes(counts.before_tile);
    counts.all = over_lanes(counts.all);
    if (turns) {
        counts.before_own = over_lanes(counts.before_own) + count_in_tile(block, own);
        counts.before_others = over_lanes(counts.before_others) + count_in_tile(block, others);
    } else {
        counts.before_own = UnitCount{0, 0};
        counts.before_others = counts.all - UnitCount{window.padding, window.padding > 0 ? 1u : 0u};
    }
    return counts;
}

MOK_DEVICE void write_unit(const Block& block, const UnitCount& place, int32_t peer, uint32_t token) {
    const PrepareArrays& arrays = block.params.arrays;
    ptx::store_global(arrays.units + place.units, schedule::PullUnit{peer, static_cast<int32_t>(token)});
    ptx::store_global(arrays.row_begin + place.units, static_cast<int32_t>(place.rows));
}

/// The rows of each lane's unit (count 0: none), from its token's on.
MOK_DEVICE void write_rows(const Block& block, const RowRecord& record, uint32_t count, uint32_t place) {
    constexpr uint32_t kAtATime = 4;
    const PrepareArrays& arrays = block.params.arrays;
    const uint32_t token_slot = record.slot - record.slot % block.top_k;
    const int32_t* from = arrays.token_rows + slot_place(block, record.peer(), token_slot + record.index());
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

/// One warp: the plan's rows of a tile, and the units whose first rows lie in it.
MOK_DEVICE void write_tile(const Block& block, uint32_t tile, uint32_t base_tile, const UnitCount& base) {
    const PrepareArrays& arrays = block.params.arrays;
    const uint32_t row = tile * kTileRows + block.lane;
    const Window window = window_of_row(block, tile * kTileRows);
    const bool is_valid = row < window.valid_end;
    RowRecord record{0, 0};
    if (is_valid) record = load_record(block, row);
    ptx::store_global(arrays.row_peer + row, is_valid ? static_cast<int32_t>(record.peer()) : -1);
    ptx::store_global(arrays.row_slot + row, is_valid ? static_cast<int32_t>(record.slot) : -1);
    const uint32_t count = record.count();
    const uint32_t firsts = ptx::ballot(count > 0);
    const bool has_zeros = window.padding > 0 && tile == window.valid_end / kTileRows;
    const bool has_tasks = tile * kTileRows < block.word(SharedWord::kTaskRows);
    if (!block.params.pulls_any || !has_tasks || (firsts == 0 && !has_zeros)) return;

    const WindowCounts counts = count_window(block, window, tile, base_tile, base);
    const UnitCount zeros{window.padding, window.padding > 0 ? 1u : 0u};
    if (has_zeros) {
        const UnitCount place = counts.before_window + (counts.before_others - counts.before_own);
        if (block.lane == 0) write_unit(block, place, schedule::kZeroSource, 0);
        for (uint32_t i = block.lane; i < window.padding; i += ptx::kWarpThreads) {
            ptx::store_global(arrays.rows + place.rows + i, static_cast<int32_t>(window.valid_end + i));
        }
    }
    UnitCount place = counts.before_window + counts.before_tile;
    place +=
        UnitCount{ptx::inclusive_sum(count, block.lane) - count, ptx::popcount(firsts & ptx::lanes_before())};
    const uint32_t own = static_cast<uint32_t>(block.params.plan.rank);
    if (record.peer() < own) {
        place += counts.all - counts.before_own;  // zeros are among all
    } else {
        place = place - counts.before_own;
        if (record.peer() > own) place += zeros;
    }
    if (count > 0) {
        write_unit(block, place, static_cast<int32_t>(record.peer()), record.slot / block.top_k);
        write_rows(block, record, count, place.rows);
    }
}

/// A block's tiles lie together; its warps take them in turn.
MOK_DEVICE void write_units(const Block& block, const Deal& deal) {
    const uint32_t tiles = block.word(SharedWord::kRows) / kTileRows;
    const uint32_t per_block = ceil_div(tiles, deal.blocks);
    const uint32_t begin = ptx::block_idx() * per_block;
    const uint32_t end = begin + per_block < tiles ? begin + per_block : tiles;
    UnitCount base{0, 0};  // units of tiles before `summed`
    uint32_t summed = 0;
    for (uint32_t first = begin; first < end; first += block.warps) {
        UnitCount sum{0, 0};
        for (uint32_t tile = summed + block.thread; tile < first; tile += block.threads()) {
            sum += tile_count(block, tile);
        }
        base += block_sum(block, sum);
        summed = first;
        if (first + block.warp < end) write_tile(block, first + block.warp, first, base);
    }
}

}  // namespace mok::prepare
