// The block of an sm_90a GEMM kernel: its warps, its tiles, and the one layout of its shared memory.
//
// A tile is 128 x 256 of the result; each of two consumer warpgroups holds a part of 64 rows in registers
// (m64n256k16). Operands arrive in stages of 64 columns of K, results leave through one staging buffer a
// part. With 3 stages, whole staging and 16 KiB for a pull warp an SM's 227 KiB are full to the byte.
#pragma once

#include "csrc/ptx/ptx.h"

namespace mok::sm90 {

inline constexpr uint32_t kTileM = 128, kTileN = 256, kTileK = 64;
inline constexpr uint32_t kParts = 2, kPartRows = 64;
inline constexpr uint32_t kAccumulators = kTileN / 2;  // a thread's, of its part
inline constexpr uint32_t kWords = kAccumulators / 2;  // the same as pairs of BF16

// Warps 0 to 3 serve, 4 to 7 and 8 to 11 are the consumer warpgroups.
inline constexpr uint32_t kLoaderWarp = 0, kSchedulerWarp = 1, kStoreWarp = 2, kPullWarp = 3;
inline constexpr uint32_t kFirstConsumerWarp = 4, kPartWarps = 4, kConsumerWarps = kParts * kPartWarps;
inline constexpr uint32_t kThreads = (kFirstConsumerWarp + kConsumerWarps) * ptx::kWarpThreads;
// 384 threads are launched with 168 registers each: 128 x 72 + 256 x 216 is as much.
inline constexpr int kServingRegisters = 72, kConsumerRegisters = 216;

// What one copy moves of an operand or result: lines of 128 bytes (64 BF16), swizzled over 128 bytes.
inline constexpr uint32_t kBoxColumns = 64, kLineBytes = 128;
inline constexpr uint32_t kRowBoxBytes = kPartRows * kLineBytes;  // of A and of results
inline constexpr uint32_t kWeightBoxRows = 128, kWeightBoxBytes = kWeightBoxRows * kLineBytes;
inline constexpr uint32_t kStageBytes = kParts * kRowBoxBytes + 2 * kWeightBoxBytes;
inline constexpr uint32_t kStages = 3;

// Staged rows that leave one by one are 16 bytes longer, so that stmatrix meets no bank conflicts; the store
// warp keeps there where they go.
inline constexpr uint32_t kStagedRowBytes = 2 * kTileN + 16;
inline constexpr uint32_t kStagingBytes = kPartRows * kStagedRowBytes;
static_assert(kStagingBytes >= kTileN / kBoxColumns * kRowBoxBytes && kStagingBytes % 1024 == 0);

inline constexpr uint32_t kPullSlots = 4, kPullSlotBytes = 4096;
inline constexpr uint32_t kTaskSlots = 4, kTaskBytes = 48;
// The loader has looked at the preview before it asks for a second task, and the slot's own is the fourth.
inline constexpr uint32_t kPreviewSlot = kTaskSlots - 1;

/// Ids of the barriers among a part's four warps; 0 is the whole block's.
enum class NamedBarrier : uint32_t { kPart0 = 1, kPart1 = 2 };

/// Addresses in this block's shared memory. An mbarrier's count is the arrivals that complete its phase.
struct Shared {
    uint32_t base;

    static constexpr uint32_t kStaging = kStages * kStageBytes;
    static constexpr uint32_t kPull = kStaging + kParts * kStagingBytes;
    static constexpr uint32_t kTasks = kPull + kPullSlots * kPullSlotBytes;
    static constexpr uint32_t kGiveUp = kTasks + kTaskSlots * kTaskBytes;
    static constexpr uint32_t kBarriers = kGiveUp + kParts * 2 * 4;
    static constexpr uint32_t kNumBarriers = 2 * (kStages + kParts + kTaskSlots) + 2 + kPullSlots;
    static constexpr uint32_t kBytes = kBarriers + 8 * kNumBarriers;
    static_assert(kBytes <= 232448, "an SM of sm_90 gives a block 227 KiB");

    MOK_DEVICE uint32_t a(uint32_t stage, uint32_t part) const {
        return base + stage * kStageBytes + part * kRowBoxBytes;
    }
    MOK_DEVICE uint32_t b(uint32_t stage) const { return a(stage, kParts); }
    MOK_DEVICE uint32_t staging(uint32_t part) const { return base + kStaging + part * kStagingBytes; }
    MOK_DEVICE uint32_t pull(uint32_t slot) const { return base + kPull + slot * kPullSlotBytes; }
    MOK_DEVICE uint32_t task(uint32_t slot) const { return base + kTasks + slot * kTaskBytes; }
    /// A part's word for even and for odd tasks: non-zero once one of its warps has given up waiting.
    MOK_DEVICE uint32_t give_up(uint32_t part, uint32_t parity) const {
        return base + kGiveUp + (2 * part + parity) * 4;
    }

    /// A stage's operands have landed (1 and their bytes) | its readers are done (each consumer warp).
    MOK_DEVICE uint32_t stage_full(uint32_t stage) const { return barrier(stage); }
    MOK_DEVICE uint32_t stage_empty(uint32_t stage) const { return barrier(kStages + stage); }
    /// A part's results are staged (its warps) | copied out of shared memory (1).
    MOK_DEVICE uint32_t staged(uint32_t part) const { return barrier(2 * kStages + part); }
    MOK_DEVICE uint32_t staging_empty(uint32_t part) const { return barrier(2 * kStages + kParts + part); }
    /// A task is published (1) | read by all (loader, store warp, each consumer warp).
    MOK_DEVICE uint32_t task_full(uint32_t slot) const { return barrier(2 * (kStages + kParts) + slot); }
    MOK_DEVICE uint32_t task_empty(uint32_t slot) const {
        return barrier(2 * (kStages + kParts) + kTaskSlots + slot);
    }
    /// The loader is near the end of its task: time to claim the next (1).
    MOK_DEVICE uint32_t claim() const { return barrier(2 * (kStages + kParts + kTaskSlots)); }
    /// The block's first task is decoded: kPreviewSlot has it (1, once).
    MOK_DEVICE uint32_t preview() const { return barrier(2 * (kStages + kParts + kTaskSlots) + 1); }
    /// A pulled piece has landed (1 and its bytes).
    MOK_DEVICE uint32_t pulled(uint32_t slot) const {
        return barrier(2 * (kStages + kParts + kTaskSlots) + 2 + slot);
    }

    /// One thread; then fence and block barrier.
    MOK_DEVICE void init_barriers() const {
        for (uint32_t i = 0; i < kStages; ++i) {
            ptx::mbar_init(stage_full(i), 1);
            ptx::mbar_init(stage_empty(i), kConsumerWarps);
        }
        for (uint32_t i = 0; i < kParts; ++i) {
            ptx::mbar_init(staged(i), kPartWarps);
            ptx::mbar_init(staging_empty(i), 1);
            ptx::store_shared(give_up(i, 0), 0u);
            ptx::store_shared(give_up(i, 1), 0u);
        }
        for (uint32_t i = 0; i < kTaskSlots; ++i) {
            ptx::mbar_init(task_full(i), 1);
            ptx::mbar_init(task_empty(i), 2 + kConsumerWarps);
        }
        ptx::mbar_init(claim(), 1);
        ptx::mbar_init(preview(), 1);
        for (uint32_t i = 0; i < kPullSlots; ++i) ptx::mbar_init(pulled(i), 1);
        ptx::fence_mbarrier_init_release_cluster();
    }

  private:
    MOK_DEVICE uint32_t barrier(uint32_t index) const { return base + kBarriers + 8 * index; }
};

/// A place in a ring of `kSlots` and the parity of its phase: a reader waits for `parity` of "full", a writer
/// for the opposite of "empty", which a fresh barrier passes at once.
template <uint32_t kSlots>
struct Cursor {
    uint32_t slot = 0;
    uint32_t parity = 0;

    MOK_DEVICE void next() {
        if (++slot == kSlots) {
            slot = 0;
            parity ^= 1;
        }
    }
};
using StageCursor = Cursor<kStages>;
using TaskCursor = Cursor<kTaskSlots>;
using StagingCursor = Cursor<1>;

}  // namespace mok::sm90
