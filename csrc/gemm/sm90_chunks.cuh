// What an epilogue reads besides its accumulators, and what it writes in place of that, goes through the ring
// of stages like operands: a chunk is 64 columns of the tile in the boxes of one stage. So the loader fetches
// the first chunks while the last K steps are multiplied, and no other shared memory is needed.
//
// A chunk's stage is given back by the store warp, once the boxes that the consumers left there are stored.
#pragma once

#include "csrc/gemm/sm90_mainloop.cuh"
#include "csrc/gemm/sm90_staging.cuh"

namespace mok::sm90 {

inline constexpr uint32_t kChunkColumns = 64, kChunks = kTileN / kChunkColumns;
inline constexpr uint32_t kStageBoxes = kStageBytes / kRowBoxBytes;
static_assert(kChunkColumns == kBoxColumns && kStageBoxes >= 3 * kParts);

/// Chunks of a tile that begins `columns` before the result's end.
MOK_DEVICE int32_t chunks_of(int32_t columns) {
    const int32_t chunks = ceil_div(columns, static_cast<int32_t>(kChunkColumns));
    return chunks < static_cast<int32_t>(kChunks) ? chunks : static_cast<int32_t>(kChunks);
}

/// Box `index` of a stage, 8 KiB each.
MOK_DEVICE uint32_t stage_box(const Shared& shared, uint32_t stage, uint32_t index) {
    return shared.a(stage, 0) + index * kRowBoxBytes;
}
// FP32 boxes have 32 columns: a part's two, side by side.
MOK_DEVICE uint32_t float_box(const Shared& shared, uint32_t stage, uint32_t part) {
    return stage_box(shared, stage, 2 * part);
}

/// As kClaimAheadSteps, for tasks whose waits are for many counters.
inline constexpr int32_t kClaimAheadStages = 12;

/// The loader's way through a task's stages.
struct StageFiller {
    const Shared& shared;
    ptx::Deadline& deadline;
    StageCursor cursor{};
    int32_t until_claim = 0;

    /// Before a task of so many stages: the next one is claimed some steps before its end.
    MOK_DEVICE void begin_task(int32_t stages) {
        until_claim = stages > kClaimAheadStages ? stages - kClaimAheadStages : 0;
        if (stages == 0) ptx::mbar_arrive(shared.claim());
    }
    /// The next stage is free and expects `bytes` on full(); false when the time is up.
    MOK_DEVICE bool begin_stage(uint32_t bytes) {
        if (until_claim-- == 0) ptx::mbar_arrive(shared.claim());
        if (!wait_stage_free(shared, cursor, deadline)) return false;
        if (bytes > 0) {
            ptx::mbar_arrive_expect(full(), bytes);
        } else {
            ptx::mbar_arrive(full());
        }
        return true;
    }
    MOK_DEVICE uint32_t full() const { return shared.stage_full(cursor.slot); }
    MOK_DEVICE uint32_t box(uint32_t index) const { return stage_box(shared, cursor.slot, index); }
    MOK_DEVICE void end_stage() { cursor.next(); }
};

/// A consumer warp has read a stage by ordinary loads and is done with it.
MOK_DEVICE void release_stage(const Shared& shared, StageCursor& cursor, uint32_t lane) {
    ptx::fence_proxy_async_shared();
    ptx::sync_warp();
    if (lane == 0) ptx::mbar_arrive(shared.stage_empty(cursor.slot));
    cursor.next();
}

/// A consumer warp has left its part of a chunk for the store warp.
MOK_DEVICE void hand_over_chunk(const Shared& shared, StageCursor& stages, StagingCursor& staging,
                                uint32_t part, uint32_t lane, ptx::Deadline& deadline) {
    begin_staging(shared, staging, part, deadline);
    end_staging(shared, staging, part, lane);
    stages.next();
}

/// The store warp: waits for a part of a chunk, calls body(), then lets the part go on to its next one.
template <typename Body>
MOK_DEVICE bool take_chunk(const Shared& shared, StagingCursor& cursor, uint32_t part, uint32_t lane,
                           ptx::Deadline& deadline, const Body& body) {
    if (!wait_staged(shared, cursor, part, deadline)) return false;
    body();
    ptx::sync_warp();
    if (lane == 0) ptx::mbar_arrive(shared.staging_empty(part));
    cursor.next();
    return true;
}

/// The store warp, after all its lanes have waited for the chunk's stores: gives the stage back for the warps
/// of `parts` parts.
MOK_DEVICE void release_chunk(const Shared& shared, uint32_t stage, uint32_t parts, uint32_t lane) {
    ptx::sync_warp();
    if (lane < parts * kPartWarps) ptx::mbar_arrive(shared.stage_empty(stage));
}

// A thread's words in a part's boxes: columns 8 j + 2 (lane % 4) and the next of row 16 part_warp + lane / 4
// + 8 h. Rows 8 apart have the same swizzle, and the pieces of a line differ in bits 4 to 6 of the address:
// so a word is the thread's first one with constants added and xored.

/// The first one of FP32 boxes (two a part, of 32 columns each), and the others by it.
MOK_DEVICE uint32_t first_float(uint32_t boxes, uint32_t part_warp, uint32_t lane) {
    const uint32_t row = lane / 4, piece = lane % 4 / 2;
    return boxes + (part_warp * 16 + row) * kLineBytes + 16 * (piece ^ row) + 8 * (lane % 2);
}
MOK_DEVICE uint32_t float_at(uint32_t first, uint32_t j, uint32_t h) {
    return (first ^ (32 * (j % 4))) + j / 4 * kRowBoxBytes + 8 * h * kLineBytes;
}

/// The same of a BF16 box.
MOK_DEVICE uint32_t first_word(uint32_t box, uint32_t part_warp, uint32_t lane) {
    const uint32_t row = lane / 4;
    return box + (part_warp * 16 + row) * kLineBytes + 16 * row + 4 * (lane % 4);
}
MOK_DEVICE uint32_t word_at(uint32_t first, uint32_t j, uint32_t h) {
    return (first ^ (16 * j)) + 8 * h * kLineBytes;
}

inline constexpr uint32_t kChunkAccumulators = kAccumulators / kChunks;

// The next chunk's accumulators take the first places: a loop over chunks has one copy of its body. Four
// copies of a long one would be more than the instruction caches hold.

/// The first chunk's are lost. Pinned, or ptxas moves them a second time at the loop's other end.
MOK_DEVICE void shift_chunks(float (&accumulators)[kAccumulators]) {
    ptx::wgmma_pin(accumulators);
#pragma unroll
    for (uint32_t i = 0; i + kChunkAccumulators < kAccumulators; ++i) {
        accumulators[i] = accumulators[i + kChunkAccumulators];
    }
}

/// The first chunk's become the last ones.
MOK_DEVICE void rotate_chunks(float (&accumulators)[kAccumulators]) {
    float first[kChunkAccumulators];
#pragma unroll
    for (uint32_t i = 0; i < kChunkAccumulators; ++i) first[i] = accumulators[i];
#pragma unroll
    for (uint32_t i = 0; i < kAccumulators; ++i) {
        const uint32_t from = i + kChunkAccumulators;
        accumulators[i] = from < kAccumulators ? accumulators[from] : first[from - kAccumulators];
    }
}

struct FloatPair {
    float low, high;
};

/// The first chunk's accumulators from FP32 boxes.
MOK_DEVICE void read_chunk(uint32_t boxes, uint32_t part_warp, uint32_t lane,
                           float (&accumulators)[kAccumulators]) {
    const uint32_t first = first_float(boxes, part_warp, lane);
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j) {
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
            const uint32_t i = 4 * j + 2 * h;
            const auto pair = ptx::load_shared<FloatPair>(float_at(first, j, h));
            accumulators[i] = pair.low;
            accumulators[i + 1] = pair.high;
        }
    }
}

/// The first chunk's accumulators into FP32 boxes, or added to what lies there.
template <bool kAdds>
MOK_DEVICE void write_chunk(uint32_t boxes, uint32_t part_warp, uint32_t lane,
                            const float (&accumulators)[kAccumulators]) {
    const uint32_t first = first_float(boxes, part_warp, lane);
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j) {
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
            const uint32_t i = 4 * j + 2 * h;
            const uint32_t address = float_at(first, j, h);
            FloatPair pair{accumulators[i], accumulators[i + 1]};
            if constexpr (kAdds) {
                const auto before = ptx::load_shared<FloatPair>(address);
                pair = {before.low + pair.low, before.high + pair.high};
            }
            ptx::store_shared(address, pair);
        }
    }
}

/// The first chunk's accumulators added to a BF16 box: one rounding of the sum.
MOK_DEVICE void add_chunk(uint32_t box, uint32_t part_warp, uint32_t lane,
                          const float (&accumulators)[kAccumulators]) {
    const uint32_t first = first_word(box, part_warp, lane);
#pragma unroll
    for (uint32_t j = 0; j < 8; ++j) {
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
            const uint32_t i = 4 * j + 2 * h;
            const uint32_t address = word_at(first, j, h);
            const uint32_t before = ptx::load_shared<uint32_t>(address);
            ptx::store_shared(address, ptx::pack_bf16(ptx::low_bf16(before) + accumulators[i],
                                                      ptx::high_bf16(before) + accumulators[i + 1]));
        }
    }
}

}  // namespace mok::sm90
