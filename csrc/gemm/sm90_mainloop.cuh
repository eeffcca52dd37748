// C[128, 256] = A[128, K] B[256, K]^T: the loader warp fills stages by TMA, each consumer warpgroup
// multiplies its 64 rows by all 256 columns. Both operands lie K-major. What lies outside a tensor arrives as
// zeros, so K may be any multiple of 8 and a matrix of any number of rows.
#pragma once

#include "csrc/gemm/sm90_shared.cuh"

namespace mok::sm90 {

/// K steps before a task's end at which the next is claimed: some microseconds, for the claim, its decoding
/// and its waits, and no earlier, so that at the end of the kernel no block sits on a task it cannot begin.
inline constexpr int32_t kClaimAheadSteps = 8;

/// K steps of a block's first tile whose B is fetched while the rows of A are still on their way: as far as
/// there are stages into them, the others into L2. 132 blocks fetch 35 MB at most, of the 50 MB of L2.
inline constexpr int32_t kEarlySteps = 8;
static_assert(kEarlySteps >= static_cast<int32_t>(kStages));

/// The loader waits for its next stage: the last load into it has landed and its readers are done. The first
/// says nothing new unless somebody has given up: then consumers free stages that they have not seen full,
/// and the barrier of a load in flight must not be armed again.
MOK_DEVICE bool wait_stage_free(const Shared& shared, const StageCursor& cursor, ptx::Deadline& deadline) {
    return ptx::mbar_wait_both(shared.stage_full(cursor.slot), shared.stage_empty(cursor.slot),
                               cursor.parity ^ 1, deadline);
}

/// The loader at its end, `cursor` at its next stage: what it has loaded lands before the block leaves, whose
/// memory is another block's then. On the way of a call that nobody ends the consumers wait for the same.
MOK_DEVICE void wait_stages_landed(const Shared& shared, StageCursor cursor, ptx::Deadline& deadline) {
#pragma unroll 1
    for (uint32_t i = 0; i < kStages; ++i) {  // at once where a stage has not been loaded yet
        ptx::mbar_wait_landed(shared.stage_full(cursor.slot), cursor.parity ^ 1, deadline);
        cursor.next();
    }
}

/// Where a tile's operands come from.
struct TileOperands {
    const ptx::TensorMap* a;  // [rows, K], boxes of 64 rows
    int32_t a_row;
    uint32_t a_parts;            // boxes to load: a second part without valid rows is left out
    const ptx::TensorMap* b[2];  // [matrices, rows, K], boxes of 128 rows: the tile's two halves of columns
    int32_t b_row[2];
    int32_t matrix;
    int32_t k_steps;  // at least 1
};

/// B of one K step.
MOK_DEVICE void load_b(const Shared& shared, uint32_t stage, const TileOperands& tile, int32_t k) {
    const uint32_t full = shared.stage_full(stage), b = shared.b(stage);
    ptx::tma_load_3d(b, tile.b[0], k, tile.b_row[0], tile.matrix, full);
    ptx::tma_load_3d(b + kWeightBoxBytes, tile.b[1], k, tile.b_row[1], tile.matrix, full);
}

/// One thread of the loader, before the block's first tile and before A is there: whatever does not depend on
/// A. Returns the steps whose B is on its way into a stage; load_tile adds A and the arrival.
MOK_DEVICE int32_t begin_first_tile(const Shared& shared, const TileOperands& tile) {
    ptx::prefetch_tensormap(tile.a);
    int32_t step = 0;
#pragma unroll 1
    for (; step < static_cast<int32_t>(kStages) && step < tile.k_steps; ++step) {
        const uint32_t stage = static_cast<uint32_t>(step);
        ptx::mbar_expect(shared.stage_full(stage), 2 * kWeightBoxBytes);
        load_b(shared, stage, tile, step * static_cast<int32_t>(kTileK));
    }
    const int32_t in_stages = step;
#pragma unroll 1
    for (; step < kEarlySteps && step < tile.k_steps; ++step) {
        const int32_t k = step * static_cast<int32_t>(kTileK);
        ptx::tma_prefetch_3d(tile.b[0], k, tile.b_row[0], tile.matrix);
        ptx::tma_prefetch_3d(tile.b[1], k, tile.b_row[1], tile.matrix);
    }
    return in_stages;
}

/// The loader where the first tile does not come after all: the arrivals that load_tile would have made.
MOK_DEVICE void abandon_first_tile(const Shared& shared, StageCursor& cursor, int32_t early_steps) {
#pragma unroll 1
    for (int32_t step = 0; step < early_steps; ++step) {
        ptx::mbar_arrive(shared.stage_full(cursor.slot));
        cursor.next();
    }
}

/// One thread of the loader: all stages of a tile, but B of the first `early_steps`, which begin_first_tile
/// has loaded. False when the time is up.
MOK_DEVICE bool load_tile(const Shared& shared, StageCursor& cursor, const TileOperands& tile,
                          ptx::Deadline& deadline, int32_t early_steps = 0) {
    const int32_t claim_step = tile.k_steps > kClaimAheadSteps ? tile.k_steps - kClaimAheadSteps : 0;
    const uint32_t a_bytes = tile.a_parts * kRowBoxBytes;
    for (int32_t step = 0; step < tile.k_steps; ++step) {
        if (step == claim_step) ptx::mbar_arrive(shared.claim());
        if (!wait_stage_free(shared, cursor, deadline)) return false;
        const uint32_t full = shared.stage_full(cursor.slot);
        const int32_t k = step * static_cast<int32_t>(kTileK);
        const bool has_b = step < early_steps;
        ptx::mbar_arrive_expect(full, has_b ? a_bytes : a_bytes + 2 * kWeightBoxBytes);
        ptx::tma_load_2d(shared.a(cursor.slot, 0), tile.a, k, tile.a_row, full);
        if (tile.a_parts > 1) {
            ptx::tma_load_2d(shared.a(cursor.slot, 1), tile.a, k,
                             tile.a_row + static_cast<int32_t>(kPartRows), full);
        }
        if (!has_b) load_b(shared, cursor.slot, tile, k);
        cursor.next();
    }
    return true;
}

/// An operand in a stage; MN-major ones are panels of 64 columns of M or N.
template <ptx::Major kMajor>
MOK_DEVICE uint64_t operand_descriptor(uint32_t address) {
    constexpr auto kSwizzle = ptx::Swizzle::k128B;
    if constexpr (kMajor == ptx::Major::kK) {
        return ptx::k_major_descriptor(address, kSwizzle);
    } else {
        return ptx::mn_major_descriptor(address, kTileK * kLineBytes, kSwizzle);
    }
}

/// A consumer warpgroup: its part of the product, or `continues`: added to what the accumulators hold. When
/// the time is up it runs on over what lies there, so that the four warps stay together; the caller looks at
/// the deadline.
template <ptx::Major kMajorA = ptx::Major::kK, ptx::Major kMajorB = ptx::Major::kK>
MOK_DEVICE void multiply_tile(const Shared& shared, StageCursor& cursor, uint32_t part, int32_t k_steps,
                              uint32_t lane, ptx::Deadline& deadline, float (&accumulators)[kAccumulators],
                              bool continues = false) {
    constexpr uint32_t kStepA = ptx::k16_step_bytes(kMajorA, ptx::Swizzle::k128B);
    constexpr uint32_t kStepB = ptx::k16_step_bytes(kMajorB, ptx::Swizzle::k128B);
    uint32_t previous = 0;
    ptx::wgmma_pin(accumulators);
    for (int32_t step = 0; step < k_steps; ++step) {
        ptx::mbar_wait(shared.stage_full(cursor.slot), cursor.parity, deadline);
        const uint64_t a = operand_descriptor<kMajorA>(shared.a(cursor.slot, part));
        const uint64_t b = operand_descriptor<kMajorB>(shared.b(cursor.slot));
        ptx::wgmma_fence();
#pragma unroll
        for (uint32_t i = 0; i < kTileK / 16; ++i) {
            ptx::wgmma_bf16<kTileN, kMajorA, kMajorB>(accumulators, ptx::advanced(a, i * kStepA),
                                                      ptx::advanced(b, i * kStepB),
                                                      continues || step > 0 || i > 0);
        }
        ptx::wgmma_commit();
        if (step > 0) {  // the stage before this one has been read
            ptx::wgmma_wait<1>();
            if (lane == 0) ptx::mbar_arrive(shared.stage_empty(previous));
        }
        previous = cursor.slot;
        cursor.next();
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(accumulators);
    if (lane == 0) ptx::mbar_arrive(shared.stage_empty(previous));
}

/// The same for a part without valid rows: it only keeps the stages moving.
MOK_DEVICE void skip_tile(const Shared& shared, StageCursor& cursor, int32_t k_steps, uint32_t lane,
                          ptx::Deadline& deadline) {
    for (int32_t step = 0; step < k_steps; ++step) {
        ptx::mbar_wait(shared.stage_full(cursor.slot), cursor.parity, deadline);
        ptx::sync_warp();
        if (lane == 0) ptx::mbar_arrive(shared.stage_empty(cursor.slot));
        cursor.next();
    }
}

}  // namespace mok::sm90
