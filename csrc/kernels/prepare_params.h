// What the kernel that prepares a call reads and writes, and how its memory is laid out. Host and device.
#pragma once

#include <cstdint>

#include "csrc/kernels/publish_params.h"
#include "csrc/layout/divisor.h"
#include "csrc/layout/peer_record.h"
#include "csrc/layout/plan.h"
#include "csrc/ptx/wait_record.h"
#include "csrc/schedule/prepared.h"

namespace mok {

inline constexpr uint32_t kPrepareMaxWarps = 32;
inline constexpr int32_t kPrepareMaxTopK = 32;  // the routes of a token lie in the lanes of one warp
inline constexpr uint32_t kTileRows = 32;       // rows of the plan that one warp turns into pull units

/// WaitRecord::place.
enum class PreparePlace : uint32_t { kCounts = 1, kRows = 2, kPublished = 3 };

/// Moments of a block that PrepareParams::times records.
enum class PrepareStamp : uint32_t {
    kStart,
    kDealt,
    kCounted,
    kMetCounts,
    kScanned,
    kPlaced,
    kMetRows,
    kEnd
};
inline constexpr uint32_t kPrepareStamps = 8;

/// A row of the plan until its pull units are made. A unit's first row knows how many rows the unit has, and
/// where they begin among the rows of its token.
struct RowRecord {
    uint32_t slot;
    uint32_t packed;

    static MOK_HD RowRecord make(uint32_t slot, uint32_t peer, uint32_t index, uint32_t count) {
        return {slot, peer | index << 8 | count << 16};
    }
    MOK_HD uint32_t peer() const { return packed & 0xff; }
    MOK_HD uint32_t index() const { return packed >> 8 & 0xff; }
    MOK_HD uint32_t count() const { return packed >> 16; }  // 0: not the first row of its unit
};
static_assert(kMaxGroupRanks <= 256 && kPrepareMaxTopK < 256);

/// Sources in the order in which the own rank pulls from them.
enum class Turn : uint32_t { kOwn = 0, kBehind = 1, kBefore = 2 };
inline constexpr uint32_t kTurns = 3;

/// Units and the rows they fill, in halves of a word so that one addition counts both: sums over one window
/// of row blocks fit (launch_prepare checks it).
struct PackedCount {
    uint32_t word;

    static MOK_HD PackedCount one(uint32_t rows) { return {1u << 16 | rows}; }
    MOK_HD uint32_t units() const { return word >> 16; }
    MOK_HD uint32_t rows() const { return word & 0xffff; }
};

/// The units whose first rows lie in a tile, by turn, in one word: 6 bits of units and 11 of rows each.
struct TileCount {
    uint64_t word;

    static MOK_HD uint64_t one(Turn turn, uint32_t rows) {
        return uint64_t{1u << kRowBits | rows} << (kTurnBits * static_cast<uint32_t>(turn));
    }
    MOK_HD PackedCount of(uint32_t turn) const {
        const uint32_t field = static_cast<uint32_t>(word >> (kTurnBits * turn)) & ((1u << kTurnBits) - 1);
        return PackedCount{field + (field >> kRowBits) * ((1u << 16) - (1u << kRowBits))};
    }

    static constexpr uint32_t kRowBits = 11, kTurnBits = 17;
};
// A tile's own units may hold the zero unit of its segment besides, which fills less than a row block.
inline constexpr int32_t kPrepareMaxBlock = 256;
static_assert(kTileRows * kPrepareMaxTopK + kPrepareMaxBlock < 1 << TileCount::kRowBits);
static_assert(kTileRows + 1 < 1 << (TileCount::kTurnBits - TileCount::kRowBits));

/// A sum of counts that no half word holds.
struct UnitCount {
    uint32_t rows;
    uint32_t units;
};

struct PrepareArrays {
    // Temporaries.
    uint64_t* tile_counts;   // TileCount [most_tiles]
    uint32_t* block_counts;  // [E_local, count_stride]: routes of each block
    uint32_t* round_masks;   // [R, most_rounds]: lanes with a row here
    uint64_t* records;       // RowRecord [rows], worst case
    int32_t* token_rows;     // [R, max_tokens * K]: each token's rows in ascending order
    int32_t* run_before;     // [runs + 1, kMaxPhases]: PlacedRun::before
    // Results: what PreparedCall points to, and the arrays behind that.
    int32_t* ids;               // one rank: [T * K], published ids; several: [R, max_tokens * K],
                                // copies of those with a row here, where warps have many rounds
    int32_t* row_peer;          // [rows]
    int32_t* row_slot;          // [rows]
    schedule::PullUnit* units;  // [rows]
    int32_t* row_begin;         // [rows + 1]
    int32_t* rows;              // [rows]
    uint32_t* counters;         // kCountersPerBlock a row block, and more_counters
    uint32_t* claims;           // task, then pull, a cache line each
    schedule::Table* table;
    schedule::PullUnits* pulls;
    schedule::RankInputs* ranks;  // [R]
    int64_t* segment_begin;       // [E_local + 1]
    int64_t* counts;              // [E_local]
    schedule::Chunk* chunks;      // [chunks + 1], table_capacity
    schedule::Piece* pieces;      // [pieces + 1]
    schedule::Run* runs;          // [runs + 1]
    int32_t* unit_begin;          // [pieces + 1]
    int32_t* reused_piece;        // [rows / block_m - ring_blocks]
    int32_t* idle_experts;        // [E_local]
};
inline constexpr uint32_t kClaimStride = 32;  // words
/// A row block's own counters, and as many spans as it may begin.
inline constexpr uint32_t kCountersPerBlock = schedule::kNumCounters - 2 + 3;

/// In the order of use, and what only the table's block needs last: a block waits for each line of parameters
/// that it reads for the first time.
struct PrepareParams {
    PeerGroup group;
    ptx::WaitLimits limits;
    PlanShape plan;
    int64_t num_tokens;     // of this rank; equal to the header's
    const void* topk_ids;   // one rank: [T, K]; several: unused, the published ids are read
    int64_t ids_offset;     // of the published ids in every window
    uint32_t* barrier;      // grid_barrier's word
    uint64_t* times;        // [blocks, kPrepareStamps] nanoseconds; nullptr: nobody asks
    uint32_t slots;         // of a rank with max_tokens
    uint32_t most_rounds;   // of such a rank
    uint32_t most_tiles;    // of the worst case
    uint32_t count_stride;  // blocks that may have rounds, rounded up to 4
    float round_cost;       // see wanted_blocks; so are the next two
    float blocks_per_slot;
    float more_blocks;
    uint32_t more_counters;  // besides kCountersPerBlock for each row block with tasks
    Divisor top_k;
    Divisor round_slots;  // of a round: whole tokens, one route a lane
    Divisor block_rows;
    Divisor ring_rows;   // at most the plan's; a longer ring is the same
    Divisor piece_rows;  // of a whole piece, window and ring stretch
    Divisor window_rows;
    Divisor stretch_pieces;  // pieces of a stretch as long as the ring
    bool publishes;          // of a small call: this kernel publishes and meets the peers itself
    bool ids_are_int64;
    bool is_recompute;
    bool pulls_any;     // some run of the pass fetches rows
    bool zeroes_first;  // ScheduleShape::zeroes_padding of the first chunk
    bool zeroes_later;  // and of the others
    PrepareArrays arrays;
    int64_t row_bytes;  // of x and dout in the heap
    const char* own_x;  // one rank: its tensors
    const char* own_dout;
    int64_t own_x_stride;  // bytes
    int64_t own_dout_stride;
    int64_t shared_tasks;  // Table::num_shared_tasks
    Published published;   // several ranks; one rank: the header alone
    schedule::ScheduleShape shape;
};

/// Offsets in a block's shared memory.
struct PrepareShared {
    uint32_t words;      // u32 [SharedWord::kCount]
    uint32_t slots;      // u32 [R]: T * K of each rank
    uint32_t warps_end;  // u32 [R]: warps that have rounds of ranks 0..r
    uint32_t total;      // u32 [E_local]: routes of the expert
    uint32_t base;       // u32 [E_local]: first its routes in earlier blocks, then this block's first row;
                         // at last, in the table's block, the pieces of earlier segments
    uint32_t begin;      // u32 [E_local + 1]: segment_begin
    uint32_t chunk;      // u32 [E_local]: the chunk in which the segment starts
    uint32_t warp_sums;  // u32 [kMostSums, kPrepareMaxWarps]
    uint32_t counters;   // u32 [warps, E_local]; in the table's block then [E_local] spans of earlier
                         // segments; at last [2, threads] units of earlier tiles, and the rows that they fill
    // Of a small call, SharedRows:
    uint32_t records;      // RowRecord [rows], worst case
    uint32_t token_rows;   // u32 [R, slots]
    uint32_t tile_counts;  // u32 [most_tiles, kTurns]
    uint32_t bytes;
};

inline constexpr uint32_t kMostSums = 3;  // that a block makes at once

enum class SharedWord : uint32_t {
    kEnded,      // the workspace has ended: leave
    kBlocks,     // that take part, but for the table's
    kPerWarp,    // rounds of a warp, at most
    kUsedWarps,  // that have rounds, of all blocks
    kRows,       // padded rows of the plan
    kTaskRows,   // those that have tasks: recompute has none behind the first chunk
    kChunks,     // of all rows
    kCuts,       // stretches of cut segments that have tasks
    kTouched,    // nobody reads it
    kCount,
};

MOK_HD PrepareShared prepare_shared(int32_t num_ranks, int32_t num_local_experts, uint32_t warps) {
    const uint32_t ranks = static_cast<uint32_t>(num_ranks);
    const uint32_t experts = static_cast<uint32_t>(num_local_experts);
    PrepareShared shared{};
    shared.slots = shared.words + 4 * static_cast<uint32_t>(SharedWord::kCount);
    shared.warps_end = shared.slots + 4 * ranks;
    shared.total = shared.warps_end + 4 * ranks;
    shared.base = shared.total + 4 * experts;
    shared.begin = shared.base + 4 * experts;
    shared.chunk = shared.begin + 4 * (experts + 1);
    shared.warp_sums = shared.chunk + 4 * experts;
    shared.counters = shared.warp_sums + 4 * kMostSums * kPrepareMaxWarps;
    const uint32_t per_warp = experts > 2 * kTileRows ? experts : 2 * kTileRows;
    shared.bytes = shared.counters + 4 * warps * per_warp;
    return shared;
}

/// The same of a small call.
MOK_HD PrepareShared prepare_small_shared(int32_t num_ranks, int32_t num_local_experts, uint32_t warps,
                                          uint32_t slots, uint32_t most_tiles) {
    PrepareShared shared = prepare_shared(num_ranks, num_local_experts, warps);
    shared.records = round_up<uint32_t>(shared.bytes, 8);
    shared.token_rows = shared.records + 8 * kTileRows * most_tiles;
    shared.tile_counts = shared.token_rows + 4 * static_cast<uint32_t>(num_ranks) * slots;
    shared.bytes = shared.tile_counts + 4 * kTurns * most_tiles;
    return shared;
}

}  // namespace mok
