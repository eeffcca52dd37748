// Where rows are kept between placing them and making pull units of them: in global memory, which blocks
// share between grid barriers, or in each block's shared memory, where a small call fits and every block
// places all of it for itself.
#pragma once

#include "csrc/kernels/prepare_block.cuh"

namespace mok::prepare {

/// Of a tile: the units whose first rows lie in it, by turn.
struct TileCounts {
    PackedCount turn[kTurns];
};

struct GlobalRows {
    const Block& block;

    MOK_DEVICE void set_record(uint32_t row, const RowRecord& record) const {
        ptx::store_global(block.params.arrays.records + row, uint64_t{record.packed} << 32 | record.slot);
    }
    MOK_DEVICE RowRecord record(uint32_t row) const {
        const uint64_t word = ptx::load_global(block.params.arrays.records + row);
        return RowRecord{static_cast<uint32_t>(word), static_cast<uint32_t>(word >> 32)};
    }
    MOK_DEVICE void set_token_row(uint32_t rank, uint32_t slot, uint32_t row) const {
        ptx::store_global(block.params.arrays.token_rows + slots_of(rank) + slot, static_cast<int32_t>(row));
    }
    MOK_DEVICE uint32_t token_row(uint32_t rank, uint32_t slot) const {
        return static_cast<uint32_t>(
            ptx::load_global(block.params.arrays.token_rows + slots_of(rank) + slot));
    }
    MOK_DEVICE void add_unit(uint32_t tile, Turn turn, uint32_t rows) const {
        ptx::red_relaxed_gpu_add(block.params.arrays.tile_counts + tile, TileCount::one(turn, rows));
    }
    MOK_DEVICE TileCounts counts(uint32_t tile) const {
        const TileCount count{ptx::ld_relaxed_gpu(block.params.arrays.tile_counts + tile)};
        return TileCounts{{count.of(0), count.of(1), count.of(2)}};
    }
    /// No launch relies on what the last one left. All `blocks` that meet call it before they do.
    MOK_DEVICE void clear_counts(uint32_t blocks) const {
#pragma unroll 1
        for (uint32_t tile = ptx::block_idx() * block.threads() + block.thread;
             tile < block.params.most_tiles; tile += blocks * block.threads()) {
            ptx::store_global(block.params.arrays.tile_counts + tile, uint64_t{0});
        }
    }

  private:
    MOK_DEVICE int64_t slots_of(uint32_t rank) const {
        return static_cast<int64_t>(rank) * block.params.slots;
    }
};

struct SharedRows {
    const Block& block;

    MOK_DEVICE void set_record(uint32_t row, const RowRecord& record) const {
        ptx::store_shared(block.shared.records + 8 * row, record);
    }
    MOK_DEVICE RowRecord record(uint32_t row) const {
        return ptx::load_shared<RowRecord>(block.shared.records + 8 * row);
    }
    MOK_DEVICE void set_token_row(uint32_t rank, uint32_t slot, uint32_t row) const {
        Block::set_entry(block.shared.token_rows, rank * block.params.slots + slot, row);
    }
    MOK_DEVICE uint32_t token_row(uint32_t rank, uint32_t slot) const {
        return Block::entry(block.shared.token_rows, rank * block.params.slots + slot);
    }
    MOK_DEVICE void add_unit(uint32_t tile, Turn turn, uint32_t rows) const {
        const uint32_t index = tile * kTurns + static_cast<uint32_t>(turn);
        ptx::red_relaxed_cta_shared_add(block.shared.tile_counts + 4 * index, PackedCount::one(rows).word);
    }
    MOK_DEVICE TileCounts counts(uint32_t tile) const {
        TileCounts counts;
#pragma unroll
        for (uint32_t turn = 0; turn < kTurns; ++turn) {
            counts.turn[turn].word = Block::entry(block.shared.tile_counts, tile * kTurns + turn);
        }
        return counts;
    }
    MOK_DEVICE void clear_counts(uint32_t) const {
#pragma unroll 1
        for (uint32_t i = block.thread; i < kTurns * block.params.most_tiles; i += block.threads()) {
            Block::set_entry(block.shared.tile_counts, i, 0);
        }
    }
};

}  // namespace mok::prepare
