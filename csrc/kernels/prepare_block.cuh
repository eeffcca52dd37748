// One block of the kernel that prepares a call: its place in shared memory, sums over the block, and how the
// ranks' rounds are dealt to warps.
//
// Each instruction of this kernel runs once or a few times, so what takes time is fetching it: loops stay
// loops, and divisors that the host knows are products (Divisor).
#pragma once

#include "csrc/comm/device/peer_barrier.cuh"
#include "csrc/kernels/prepare_params.h"
#include "csrc/ptx/ptx.h"

namespace mok::prepare {

constexpr uint32_t kNoRow = 0xffffffffu;

struct Block {
    const PrepareParams& params;
    PrepareShared shared;  // absolute addresses
    uint32_t experts;
    uint32_t ranks;
    uint32_t warps;
    uint32_t thread;
    uint32_t warp;
    uint32_t lane;

    MOK_DEVICE uint32_t threads() const { return warps * ptx::kWarpThreads; }
    MOK_DEVICE uint32_t counter(uint32_t of_warp, uint32_t expert) const {
        return shared.counters + 4 * (of_warp * experts + expert);
    }
    MOK_DEVICE uint32_t word(SharedWord which) const {
        return ptx::load_shared<uint32_t>(shared.words + 4 * static_cast<uint32_t>(which));
    }
    MOK_DEVICE void set_word(SharedWord which, uint32_t value) const {
        ptx::store_shared(shared.words + 4 * static_cast<uint32_t>(which), value);
    }
    /// Entry `index` of one of the arrays above.
    MOK_DEVICE static uint32_t entry(uint32_t array, uint32_t index) {
        return ptx::load_shared<uint32_t>(array + 4 * index);
    }
    MOK_DEVICE static void set_entry(uint32_t array, uint32_t index, uint32_t value) {
        ptx::store_shared(array + 4 * index, value);
    }
};

template <bool kSmall>
MOK_DEVICE Block make_block(const PrepareParams& params) {
    const uint32_t warps = ptx::block_threads() / ptx::kWarpThreads;
    const int32_t ranks = params.plan.num_ranks, experts = params.plan.num_local_experts();
    PrepareShared shared = kSmall
                               ? prepare_small_shared(ranks, experts, warps, params.slots, params.most_tiles)
                               : prepare_shared(ranks, experts, warps);
    const uint32_t base = ptx::dynamic_shared();
    for (uint32_t* offset : {&shared.words, &shared.slots, &shared.warps_end, &shared.total, &shared.base,
                             &shared.begin, &shared.chunk, &shared.warp_sums, &shared.counters,
                             &shared.records, &shared.token_rows, &shared.tile_counts}) {
        *offset += base;
    }
    return Block{params,
                 shared,
                 static_cast<uint32_t>(experts),
                 static_cast<uint32_t>(ranks),
                 warps,
                 ptx::thread_idx(),
                 ptx::warp_idx(),
                 ptx::lane_idx()};
}

MOK_DEVICE void stamp(const Block& block, PrepareStamp moment) {
    if (block.params.times == nullptr || block.thread != 0) return;
    ptx::store_global(block.params.times + ptx::block_idx() * kPrepareStamps + static_cast<uint32_t>(moment),
                      ptx::timer_ns());
}

template <uint32_t kSums>
struct Prefix {
    uint32_t before[kSums];  // of earlier threads
    uint32_t total[kSums];
};

/// The sums of `values` over the threads before this one, and over all. The whole block calls it.
template <uint32_t kSums>
MOK_DEVICE Prefix<kSums> block_prefix(const Block& block, const uint32_t (&values)[kSums]) {
    static_assert(kSums <= kMostSums);
    const auto warp_sums = [&](uint32_t sum) { return block.shared.warp_sums + 4 * kPrepareMaxWarps * sum; };
    Prefix<kSums> result;
#pragma unroll
    for (uint32_t i = 0; i < kSums; ++i) {
        const uint32_t in_warp = ptx::inclusive_sum(values[i], block.lane);
        if (block.lane == ptx::kWarpThreads - 1) Block::set_entry(warp_sums(i), block.warp, in_warp);
        result.before[i] = in_warp - values[i];
    }
    ptx::sync_block();
#pragma unroll
    for (uint32_t i = 0; i < kSums; ++i) {
        const uint32_t sum = block.lane < block.warps ? Block::entry(warp_sums(i), block.lane) : 0;
        result.before[i] += ptx::reduce_add(block.lane < block.warp ? sum : 0);
        result.total[i] = ptx::reduce_add(sum);
    }
    ptx::sync_block();  // the next one writes the sums
    return result;
}

/// The last of `count` ascending entries that is at most `value`; the first one is.
MOK_DEVICE uint32_t last_at_most(uint32_t array, uint32_t count, uint32_t value) {
    uint32_t low = 0, high = count;
    while (high - low > 1) {
        const uint32_t middle = (low + high) / 2;
        const bool is_low = Block::entry(array, middle) <= value;
        low = is_low ? middle : low;
        high = is_low ? high : middle;
    }
    return low;
}

/// Every block but the one that makes the table, unless there is only one.
MOK_DEVICE uint32_t most_blocks() {
    return ptx::num_blocks() > 1 ? ptx::num_blocks() - 1 : 1;
}

/// Blocks that share the work: a round for each warp while there are multiprocessors (a round on all warps of
/// one costs about as much as a grid barrier, docs/performance), but at most so many that summing
/// everyone's totals (blocks x experts words each) stays cheaper than the rounds; a warp for every two tiles,
/// guessed from the slots as if routes were spread evenly; and a warp for each rank.
MOK_DEVICE uint32_t wanted_blocks(const Block& block, uint32_t slots, uint32_t rounds) {
    const PrepareParams& params = block.params;
    const uint32_t cheapest = static_cast<uint32_t>(sqrtf(params.round_cost * static_cast<float>(rounds)));
    uint32_t blocks = ceil_div(rounds, block.warps);
    if (blocks > cheapest) blocks = cheapest;
    const uint32_t for_tiles = static_cast<uint32_t>(params.blocks_per_slot * static_cast<float>(slots) +
                                                     (slots > 0 ? params.more_blocks : 0.0f));
    if (blocks < for_tiles) blocks = for_tiles;
    const uint32_t fewest = ceil_div(block.ranks, block.warps);
    if (blocks < fewest) blocks = fewest;
    return blocks < most_blocks() ? blocks : most_blocks();
}

/// Who works on what: the same in all blocks. In a small call each block has all rounds, and only its share
/// of the tiles.
struct Deal {
    bool ended;
    uint32_t blocks;
    uint32_t per_warp;
    uint32_t used_warps;

    MOK_DEVICE uint32_t table_block() const { return ptx::num_blocks() > 1 ? blocks : 0; }
    MOK_DEVICE uint32_t meeting_blocks() const { return ptx::num_blocks() > 1 ? blocks + 1 : 1; }
    MOK_DEVICE bool has_part() const { return ptx::block_idx() < blocks; }
};

/// A rank's tokens; a count outside [0, max_tokens] cannot be and is cut, so that nothing is written outside
/// the plan's arrays.
MOK_DEVICE uint32_t num_tokens_of(const Block& block, uint32_t rank) {
    const PrepareParams& params = block.params;
    int64_t tokens = params.num_tokens;
    if (block.ranks > 1) tokens = ptx::load_global(&call_header(params.group, rank)->num_tokens);
    const int64_t most = params.plan.max_tokens;
    return static_cast<uint32_t>(tokens < 0 ? 0 : tokens > most ? most : tokens);
}

/// One warp: all lines of the parameters come to this multiprocessor while others deal.
MOK_DEVICE void touch_parameters(const Block& block) {
    constexpr uint32_t kLineWords = 16;
    const auto* words = reinterpret_cast<const uint32_t*>(&block.params);
    uint32_t sum = 0;
#pragma unroll 4
    for (uint32_t word = 0; word < sizeof(PrepareParams) / 4; word += kLineWords) sum += words[word];
    if (block.lane == 0) block.set_word(SharedWord::kTouched, sum);
}

/// Reads the ranks' token counts and deals their rounds: in the order (source rank, slot), contiguous ones to
/// a warp, all of one rank.
template <bool kSmall>
MOK_DEVICE Deal deal_rounds(const Block& block) {
    if (block.warp == 0) {
        const bool ended = ptx::ld_relaxed_gpu(block.params.limits.expired) != 0;
        const Divisor& round_slots = block.params.round_slots;
        uint32_t all_slots = 0, rounds = 0;
#pragma unroll 1
        for (uint32_t first = 0; first < block.ranks; first += ptx::kWarpThreads) {
            const uint32_t rank = first + block.lane;
            uint32_t slots = 0;
            if (rank < block.ranks) {
                slots = num_tokens_of(block, rank) * block.params.top_k.divisor;
                Block::set_entry(block.shared.slots, rank, slots);
            }
            all_slots += ptx::reduce_add(slots);
            rounds += ptx::reduce_add(round_slots.divide_up(slots));
        }
        const uint32_t blocks = kSmall ? most_blocks() : wanted_blocks(block, all_slots, rounds);
        const uint32_t most_warps = kSmall ? block.warps : blocks * block.warps;
        uint32_t per_warp = ceil_div(rounds, most_warps);
        if (per_warp == 0) per_warp = 1;
        uint32_t used = 0;
        for (;; ++per_warp) {  // ends: there is a warp for each rank
            used = 0;
#pragma unroll 1
            for (uint32_t first = 0; first < block.ranks; first += ptx::kWarpThreads) {
                const uint32_t rank = first + block.lane;
                const bool is_rank = rank < block.ranks;
                const uint32_t slots = is_rank ? Block::entry(block.shared.slots, rank) : 0;  // its own
                const uint32_t warps = ceil_div(round_slots.divide_up(slots), per_warp);
                const uint32_t end = used + ptx::inclusive_sum(warps, block.lane);
                if (is_rank) Block::set_entry(block.shared.warps_end, rank, end);
                used = ptx::shuffle(end, ptx::kWarpThreads - 1);
            }
            if (used <= most_warps) break;
        }
        if (block.lane == 0) {
            block.set_word(SharedWord::kEnded, ended ? 1 : 0);
            block.set_word(SharedWord::kBlocks, blocks);
            block.set_word(SharedWord::kPerWarp, per_warp);
            block.set_word(SharedWord::kUsedWarps, used);
        }
    }
    ptx::sync_block();
    return Deal{block.word(SharedWord::kEnded) != 0, block.word(SharedWord::kBlocks),
                block.word(SharedWord::kPerWarp), block.word(SharedWord::kUsedWarps)};
}

/// A warp's rounds: [round, end) of one rank.
struct Share {
    uint32_t rank;
    uint32_t round;
    uint32_t end;
    uint32_t slots;  // of the rank
};

template <bool kSmall>
MOK_DEVICE Share make_share(const Block& block, const Deal& deal) {
    const uint32_t index = (kSmall ? 0 : ptx::block_idx() * block.warps) + block.warp;
    if (index >= deal.used_warps) return Share{0, 0, 0, 0};
    uint32_t rank = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < block.ranks; first += ptx::kWarpThreads) {
        const uint32_t candidate = first + block.lane;
        const bool is_before =
            candidate < block.ranks && Block::entry(block.shared.warps_end, candidate) <= index;
        rank += ptx::popcount(ptx::ballot(is_before));
    }
    const uint32_t before = rank == 0 ? 0 : Block::entry(block.shared.warps_end, rank - 1);
    const uint32_t slots = Block::entry(block.shared.slots, rank);
    const uint32_t rounds = block.params.round_slots.divide_up(slots);
    const uint32_t round = (index - before) * deal.per_warp;
    const uint32_t end = round + deal.per_warp;
    return Share{rank, round, end < rounds ? end : rounds, slots};
}

}  // namespace mok::prepare
