// The pull warp of the BF16 megakernels: each distinct (token, rank) row of a chunk crosses the link
// once, in pieces of 4 KiB, and is stored to all its rows.
//
// A batch is up to four consecutive elements of the pull list, one for each slot of the warp's shared memory.
// While an element is stored, the next three are loading. Lane j stores the row j of an element (and j + 32,
// ...), waits for its own stores and signals its own row's block. Signals of a batch go out together, when
// the stores of the next batch's first element have been issued: one fence for all of them.
//
// The list is worked on in order. Before the warp waits for the readers of a ring row it signals everything
// it has stored, so nobody waits for a pull that waits for him.
#pragma once

#include "csrc/gemm/sm90_shared.cuh"
#include "csrc/kernels/sm90_bf16_moe_call.cuh"

namespace mok::moe_detail {

inline constexpr uint32_t kNoRow = 0xffffffffu;
/// Bits of Puller::slots, shifted by the slot.
inline constexpr uint32_t kPullParity = 1, kPullInFlight = 1 << kPullSlots;

/// Where the rows of an element go.
enum class PullTarget : uint32_t { kRingX, kRingDout, kSavedX };

/// Elements of one claim, each decoded by the lane of its slot.
struct PullBatch {
    uint32_t index;     // of its first element
    uint32_t count;     // 0: the list is at its end
    uint32_t bytes;     // the lane's own element: of the piece
    uint32_t offset;    // of the piece in its row
    int32_t first_row;  // index into PullUnits::rows
    int32_t num_rows;
    uint32_t target;     // a PullTarget
    const char* source;  // null: zeros
};

/// A register a slot, picked by a slot's number without a trip through memory.
struct PerSlot {
    uint32_t values[kPullSlots];

    MOK_DEVICE uint32_t get(uint32_t slot) const {
        uint32_t value = values[0];
#pragma unroll
        for (uint32_t i = 1; i < kPullSlots; ++i) {
            if (slot == i) value = values[i];
        }
        return value;
    }
    MOK_DEVICE void set(uint32_t slot, uint32_t value) {
#pragma unroll
        for (uint32_t i = 0; i < kPullSlots; ++i) {
            if (slot == i) values[i] = value;
        }
    }
};

/// One warp's work.
template <bool kBackward>
struct Puller {
    const MoeCallParams& params;
    const Shared& shared;
    uint32_t lane;
    uint32_t grain;  // elements of a claim
    ptx::Deadline deadline;
    uint32_t slots = 0;   // kPullParity: of the slot's barrier; kPullInFlight: its load is not waited for yet
    PerSlot rows;         // this lane's row of the element in each slot
    PerSlot unsignalled;  // counters of stores whose signals are due
    int32_t run_hint = 0;
    uint32_t free_block = kNoRow;  // this lane has seen that the ring slot of this row block is free

    MOK_DEVICE Puller(const MoeCallParams& params_in, const Shared& shared_in)
        : params(params_in),
          shared(shared_in),
          lane(ptx::lane_idx()),
          deadline(deadline_at(params_in, WaitPlace::kPullLoad)) {
        // A short list is dealt out evenly, so that all links of the GPU begin at once: an even share,
        // rounded up, at least one and at most a batch. By comparisons, because a division of 64 bits is a
        // call into code that no cache holds yet, in front of the first row.
        const int64_t num_pulls = table().num_pulls;
        grain = 1;
#pragma unroll
        for (uint32_t i = 1; i < kPullSlots; ++i) {
            if (num_pulls > static_cast<int64_t>(i) * ptx::num_blocks()) ++grain;
        }
#pragma unroll
        for (uint32_t i = 0; i < kPullSlots; ++i) rows.values[i] = unsignalled.values[i] = kNoRow;
    }

    MOK_DEVICE const schedule::Table& table() const {
        return *params.call.table;
    }

    /// The next claim of this warp, in lane 0; in flight until take() looks at it.
    MOK_DEVICE uint32_t claim() {
        return lane == 0 ? ptx::atom_relaxed_gpu_add(params.call.pull_claim, grain) : 0;
    }

    MOK_DEVICE PullBatch take(uint32_t claimed) {
        PullBatch batch{};
        batch.index = ptx::shuffle(claimed, 0);
        const int64_t left = table().num_pulls - static_cast<int64_t>(batch.index);
        batch.count = static_cast<uint32_t>(left <= 0 ? 0 : (left < grain ? left : grain));
        if (batch.count == 0) return batch;
        run_hint = find_run<&schedule::Run::pull_begin>(table(), batch.index, run_hint, lane);
        if (lane < batch.count) decode(batch);
        return batch;
    }

    MOK_DEVICE void decode(PullBatch& batch) {
        const schedule::PullUnits& units = *params.call.units;
        const int64_t index = static_cast<int64_t>(batch.index) + lane;
        int32_t run = run_hint;  // of the batch's first element
        while (run + 1 < table().num_runs && table().runs[run + 1].pull_begin <= index) ++run;
        const schedule::PullElement element = schedule::pull_element(params.shape, table(), run, index);
        const schedule::PullUnit unit = units.units[element.unit];
        const uint32_t row_bytes = static_cast<uint32_t>(params.shape.sizes.row_bytes);
        batch.offset = static_cast<uint32_t>(element.piece) * kPullSlotBytes;
        batch.bytes = row_bytes - batch.offset < kPullSlotBytes ? row_bytes - batch.offset : kPullSlotBytes;
        batch.first_row = units.row_begin[element.unit];
        batch.num_rows = units.row_begin[element.unit + 1] - batch.first_row;
        bool is_dout = false;
        PullTarget target = PullTarget::kRingX;
        if constexpr (kBackward) {
            is_dout = element.what == schedule::Pulled::kDout;
            if (is_dout) target = PullTarget::kRingDout;
        } else {
            const int32_t chunk = table().pieces[table().runs[element.run].piece].chunk;
            if (params.shape.saves_x(chunk)) target = PullTarget::kSavedX;
        }
        batch.target = static_cast<uint32_t>(target);
        if (unit.peer != schedule::kZeroSource) {
            const schedule::RankInputs& rank = params.call.ranks[unit.peer];
            const char* rows_of_rank = is_dout ? rank.dout : rank.x;
            const int64_t stride = is_dout ? rank.dout_stride : rank.x_stride;
            batch.source = rows_of_rank + unit.token * stride + batch.offset;
        }
    }

    /// Starts the load of one element into its slot, which nothing reads any more. Nothing where the warp has
    /// given up: the slot may still be in use.
    MOK_DEVICE void load(const PullBatch& batch, uint32_t slot) {
        if (slot >= batch.count || deadline.expired) return;
        slots |= kPullInFlight << slot;
        const uint32_t bytes = ptx::shuffle(batch.bytes, slot);
        const uint64_t source = ptx::shuffle(reinterpret_cast<uint64_t>(batch.source), slot);
        const int32_t first_row = ptx::shuffle(batch.first_row, slot);
        const int32_t num_rows = ptx::shuffle(batch.num_rows, slot);
        const uint32_t to = shared.pull(slot), barrier = shared.pulled(slot);
        if (source == 0) {
            for (uint32_t at = 16 * lane; at < bytes; at += 16 * ptx::kWarpThreads) {
                ptx::store_shared(to + at, ptx::Words4{});
            }
            ptx::fence_proxy_async_shared();
            ptx::sync_warp();
            if (lane == 0) ptx::mbar_arrive(barrier);
        } else if (lane == 0) {
            ptx::mbar_arrive_expect(barrier, bytes);
            ptx::bulk_load(to, reinterpret_cast<const void*>(source), bytes, barrier);
        }
        const uint32_t* unit_rows = reinterpret_cast<const uint32_t*>(params.call.units->rows) + first_row;
        rows.set(slot, static_cast<int32_t>(lane) < num_rows ? ptx::load_global(unit_rows + lane) : kNoRow);
    }

    /// Stores a loaded element to this lane's row of it, once the row's slot of the ring is free. Returns the
    /// counter that is to be told.
    MOK_DEVICE uint32_t store_row(uint32_t row, PullTarget target, uint32_t slot, uint32_t offset,
                                  uint32_t bytes) {
        uint32_t block = kNoRow;
        if (row != kNoRow) block = row / kTileM;
        if (target != PullTarget::kSavedX) wait_for_slot(block);
        if (row == kNoRow) return kNoRow;
        const int64_t row_bytes = params.shape.sizes.row_bytes;
        char* to = params.saved_x_rows + row * row_bytes;
        if (target != PullTarget::kSavedX) {
            const int64_t at = ring_row(params.shape, static_cast<int32_t>(block)) + row % kTileM;
            to = (target == PullTarget::kRingDout ? params.ring_dout : params.ring_x) + at * row_bytes;
        }
        ptx::bulk_store(to + offset, slot, bytes);
        const Counter counter = target == PullTarget::kRingDout ? Counter::kDout : Counter::kX;
        const int32_t index = schedule::counter_block(params.shape, false, static_cast<int32_t>(block));
        return static_cast<uint32_t>(counter_address(params, counter, index) - params.call.counters);
    }

    /// The whole warp, each lane for its own row block: once for all pieces of an element's rows.
    MOK_DEVICE void wait_for_slot(uint32_t block) {
        // Leaves the other pass's waits out of this kernel.
        if (params.shape.backward() != kBackward) __builtin_unreachable();
        constexpr int32_t kWaits = kBackward ? 2 : 1;
        const uint32_t ring_blocks = static_cast<uint32_t>(params.shape.ring_blocks);
        const bool wraps = block != kNoRow && block != free_block && block >= ring_blocks;
        if (!ptx::any_lane(wraps)) return;
        schedule::Wait waits[schedule::kMaxWaits];
        int32_t num_waits = 0;
        if (wraps) {
            free_block = block;
            num_waits = schedule::pull_waits(params.shape, table(), static_cast<int32_t>(block), waits);
        }
#pragma unroll
        for (int32_t i = 0; i < kWaits; ++i) wait_for_readers(i < num_waits, waits[i]);
        // The slot's readers were TMA loads; its writers are bulk stores.
        ptx::fence_proxy_async_global();
    }

    MOK_DEVICE void wait_for_readers(bool waits, const schedule::Wait& wait) {
        const uint32_t* counter = nullptr;
        uint32_t target = 0;
        if (waits) {
            const Counter which = kBackward ? wait.counter : Counter::kGateUp;
            counter = counter_address(params, which, wait.first);
            target = static_cast<uint32_t>(wait.target);
        }
        const bool is_short = counter != nullptr && ptx::ld_acquire_gpu(counter) < target;
        if (!ptx::any_lane(is_short)) return;
        signal<0>();
        deadline.place = static_cast<uint32_t>(WaitPlace::kPullSlot);
        if (is_short) ptx::wait_reached_acquire_gpu(counter, target, deadline);
        if (ptx::any_lane(deadline.expired)) deadline.expired = true;  // lanes leave together
        deadline.place = static_cast<uint32_t>(WaitPlace::kPullLoad);
    }

    /// Signals what is due, once all but the newest kPending groups of stores are complete.
    template <int kPending>
    MOK_DEVICE void signal() {
        ptx::bulk_wait<kPending>();
        ptx::fence_acq_rel_gpu();
#pragma unroll
        for (uint32_t i = 0; i < kPullSlots; ++i) {
            const uint32_t counter = unsignalled.values[i];
            if (counter != kNoRow) ptx::red_relaxed_gpu_add(params.call.counters + counter, 1u);
            unsignalled.values[i] = kNoRow;
        }
    }

    /// Waits for the element in a slot and stores it; then the slot before it is free again, and in a batch
    /// that is not full, all of them.
    MOK_DEVICE void store(const PullBatch& batch, uint32_t slot) {
        if (slot >= batch.count) {
            ptx::bulk_wait_read<0>();
            ptx::sync_warp();
            return;
        }
        const auto target = static_cast<PullTarget>(ptx::shuffle(batch.target, slot));
        const uint32_t offset = ptx::shuffle(batch.offset, slot), bytes = ptx::shuffle(batch.bytes, slot);
        const int32_t num_rows = ptx::shuffle(batch.num_rows, slot);
        const int32_t first_row = ptx::shuffle(batch.first_row, slot);
        ptx::mbar_wait(shared.pulled(slot), slots >> slot & kPullParity, deadline);
        if (ptx::any_lane(deadline.expired)) deadline.expired = true;
        if (deadline.expired) return;
        slots ^= (kPullInFlight | kPullParity) << slot;
        uint32_t row = rows.get(slot), counter = kNoRow;
        for (int32_t first = 0;;) {
            counter = store_row(row, target, shared.pull(slot), offset, bytes);
            ptx::bulk_commit();
            first += ptx::kWarpThreads;
            if (first >= num_rows) break;
            // More rows than lanes (top_k above 32): signalled at once.
            signal<0>();
            if (counter != kNoRow) ptx::red_relaxed_gpu_add(params.call.counters + counter, 1u);
            const int32_t at = first + static_cast<int32_t>(lane);
            row = at < num_rows ? static_cast<uint32_t>(params.call.units->rows[first_row + at]) : kNoRow;
        }
        if (slot == 0) signal<1>();
        unsignalled.set(slot, counter);
        ptx::bulk_wait_read<1>();
        ptx::sync_warp();
    }

    /// The warp has given up: what it has started ends before the block leaves, whose memory is another
    /// block's then.
    MOK_DEVICE void wait_for_copies() {
#pragma unroll 1
        for (uint32_t slot = 0; slot < kPullSlots; ++slot) {
            if ((slots >> slot & kPullInFlight) == 0) continue;
            ptx::mbar_wait_landed(shared.pulled(slot), slots >> slot & kPullParity, deadline);
        }
        ptx::bulk_wait_read<0>();
    }
};

MOK_DEVICE void record_pull(const MoeCallParams& params, const PullBatch& batch, uint32_t grain, uint32_t row,
                            uint64_t start) {
    const int64_t at = batch.index / grain;
    if (at >= params.spans.num_pulls) return;
    TaskSpan& span = params.spans.pulls[at];
    ptx::store_global(&span.kind, kPullSpan);
    ptx::store_global(&span.shared, 0);
    ptx::store_global(&span.cta, static_cast<int32_t>(ptx::block_idx()));
    ptx::store_global(&span.row_block, static_cast<int32_t>(row / kTileM));
    ptx::store_global(&span.column, static_cast<int32_t>(batch.count));
    ptx::store_global(&span.waited_for, -1);
    ptx::store_global(&span.start, start);
    ptx::store_global(&span.end, ptx::timer_ns());
}

/// The whole warp.
template <bool kBackward, bool kTimeline>
MOK_DEVICE bool run_pull_warp(const MoeCallParams& params, const Shared& shared) {
    Puller<kBackward> puller(params, shared);
    // What the ranks wrote before the barrier is read by another proxy.
    ptx::fence_proxy_async_global();
    constexpr uint32_t kAhead = kPullSlots - 1;  // loads in flight
    PullBatch batch = puller.take(puller.claim()), next{};
#pragma unroll 1
    for (uint32_t slot = 0; slot < kAhead; ++slot) puller.load(batch, slot);
    while (batch.count > 0 && !puller.deadline.expired) {
        [[maybe_unused]] const uint64_t start = kTimeline ? ptx::timer_ns() : 0;
        [[maybe_unused]] const uint32_t row = puller.rows.values[0];
        const uint32_t claimed = puller.claim();
#pragma unroll 1
        for (uint32_t slot = 0; slot < kPullSlots; ++slot) {
            puller.store(batch, slot);
            if (slot == 1) next = puller.take(claimed);
            const bool is_next = slot > 0;
            puller.load(is_next ? next : batch, is_next ? slot - 1 : kAhead);
        }
        if constexpr (kTimeline) {
            if (puller.lane == 0) record_pull(params, batch, puller.grain, row, start);
        }
        batch = next;
    }
    if (puller.deadline.expired) {
        puller.wait_for_copies();
    } else {
        puller.template signal<0>();
    }
    return puller.deadline.expired;
}

}  // namespace mok::moe_detail
