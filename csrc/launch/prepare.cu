#include <algorithm>
#include <limits>

#include "csrc/kernels/prepare.cuh"
#include "csrc/kernels/publish.cuh"
#include "csrc/launch/launch.cuh"
#include "csrc/launch/prepare.h"
#include "csrc/layout/check.h"
#include "csrc/layout/plan_host.h"

namespace mok::launch {

namespace {

constexpr int64_t kAlign = 256;
constexpr int64_t kMaxSharedBytes = 227 * 1024;  // of a block since sm_90
constexpr int64_t kMostSmallTiles = 1024;        // so that sizes of shared memory fit in 32 bits

void check_shape(const Preparation& preparation) {
    const PlanShape& plan = preparation.plan;
    const schedule::ScheduleShape& shape = preparation.shape;
    check_plan_shape(plan);
    MOK_CHECK(worst_case_rows(plan) <= std::numeric_limits<int32_t>::max(), "max_tokens = ", plan.max_tokens,
              " with top_k = ", plan.top_k, " on ", plan.num_ranks,
              " ranks: the plan has more than 2^31 rows; pass fewer tokens per call.");
    MOK_CHECK(plan.top_k <= kPrepareMaxTopK, "top_k = ", plan.top_k, ": on a GPU it must be at most ",
              kPrepareMaxTopK, ".");
    MOK_CHECK(plan.pad == shape.block_m && shape.block_m % static_cast<int32_t>(kTileRows) == 0 &&
                  shape.block_m <= kPrepareMaxBlock,
              "pad = ", plan.pad, ": must equal the row block, ", shape.block_m,
              " rows, which must be a multiple of ", kTileRows, " up to ", kPrepareMaxBlock, ".");
    // Sums over a window are counted in 16 bits.
    const int64_t window_rows = int64_t{shape.window_blocks} * shape.block_m;
    MOK_CHECK(window_rows * plan.top_k + shape.block_m < 1 << 16, "window_blocks = ", shape.window_blocks,
              " with top_k = ", plan.top_k, ": the rows of a window times top_k must be below 2^16.");
}

/// Slots of one round: whole tokens, one route a lane.
uint32_t round_slots(const PlanShape& plan) {
    const uint32_t top_k = static_cast<uint32_t>(plan.top_k);
    return kTileRows / top_k * top_k;
}

/// Rounds of a rank with max_tokens.
int64_t most_rounds(const PlanShape& plan) {
    return ceil_div<int64_t>(plan.max_tokens * plan.top_k, round_slots(plan));
}

/// PrepareParams::more_counters: those that do not grow with the rows. A table has no more pieces,
/// and so no more spans, than experts, chunks (at most 2 for each row block, and 1) and row blocks in all.
int64_t more_counters(const schedule::ScheduleShape& shape) {
    return int64_t{schedule::kNumCounters - 2} * shape.num_shared_blocks + shape.sizes.num_local_experts + 3 +
           shape.routed.span_tiles();
}

uint32_t count_stride(uint32_t blocks) {
    return round_up(blocks, 4u);
}

struct Grid {
    uint32_t warps;
    uint32_t blocks;
    uint32_t shared_bytes;
    bool is_small;
};

Grid grid_of(const Preparation& preparation) {
    check_shape(preparation);
    const PlanShape& plan = preparation.plan;
    const int64_t experts = plan.num_local_experts();
    const int64_t fixed = prepare_shared(plan.num_ranks, plan.num_local_experts(), 0).bytes;
    const int64_t per_warp = prepare_shared(plan.num_ranks, plan.num_local_experts(), 1).bytes - fixed;
    int64_t warps = std::min<int64_t>(kPrepareMaxWarps, (kMaxSharedBytes - fixed) / per_warp);
    MOK_CHECK(warps >= 1, "num_experts = ", plan.num_experts, " on ", plan.num_ranks, " ranks: ", experts,
              " experts on one rank are more than a block can count in shared memory; use more ranks.");
    if (preparation.warps > 0) warps = std::min<int64_t>(warps, preparation.warps);
    int64_t most = preparation.multiprocessors > 0 ? preparation.multiprocessors : num_multiprocessors();
    if (preparation.most_blocks > 0) most = std::min<int64_t>(most, preparation.most_blocks);
    // A warp's rounds are of one rank; the table takes a block of its own.
    const int64_t tiles = worst_case_rows(plan) / kTileRows;
    const int64_t rounds = plan.num_ranks * most_rounds(plan);
    // A small call: a block keeps all rounds in registers and all rows in shared memory.
    const int64_t used_warps =
        plan.num_ranks * std::max<int64_t>(ceil_div<int64_t>(most_rounds(plan), prepare::kBatchRounds), 1);
    if (preparation.may_be_small && used_warps <= warps && tiles <= kMostSmallTiles) {
        const PrepareShared shared = prepare_small_shared(
            plan.num_ranks, plan.num_local_experts(), static_cast<uint32_t>(warps),
            static_cast<uint32_t>(plan.max_tokens * plan.top_k), static_cast<uint32_t>(tiles));
        if (shared.bytes <= kMaxSharedBytes) {
            const int64_t blocks = std::min(most, ceil_div(std::max<int64_t>(tiles, 1), warps) + 1);
            return {static_cast<uint32_t>(warps), static_cast<uint32_t>(blocks), shared.bytes, true};
        }
    }
    const int64_t wanted = ceil_div(std::max<int64_t>({rounds, tiles, plan.num_ranks, 1}), warps) + 1;
    const int64_t blocks = std::min(most, wanted);
    MOK_CHECK(std::max<int64_t>(blocks - 1, 1) * warps >= plan.num_ranks, "the preparation of a call has ",
              most, " multiprocessors for ", plan.num_ranks, " ranks: give it more.");
    return {static_cast<uint32_t>(warps), static_cast<uint32_t>(blocks),
            static_cast<uint32_t>(fixed + warps * per_warp), false};
}

/// Places arrays one behind the other.
class Placer {
  public:
    explicit Placer(void* base) : base_(static_cast<char*>(base)) {}

    template <typename T>
    void place(T*& array, int64_t count) {
        array = reinterpret_cast<T*>(base_ + bytes_);
        bytes_ = round_up<int64_t>(bytes_ + count * static_cast<int64_t>(sizeof(T)), kAlign);
    }
    int64_t bytes() const { return bytes_; }

  private:
    char* base_;
    int64_t bytes_ = 0;
};

PrepareArrays place_arrays(const Preparation& preparation, void* scratch, int64_t* bytes) {
    const PlanShape& plan = preparation.plan;
    const schedule::ScheduleShape& shape = preparation.shape;
    const Grid grid = grid_of(preparation);
    const int64_t experts = plan.num_local_experts();
    const int64_t rows = worst_case_rows(plan);
    const int64_t slots = plan.max_routes();
    const schedule::TableCapacity capacity = schedule::table_capacity(shape, rows);
    PrepareArrays arrays{};
    Placer placer(scratch);
    placer.place(arrays.table, 1);
    placer.place(arrays.pulls, 1);
    placer.place(arrays.ranks, plan.num_ranks);
    placer.place(arrays.row_peer, rows);
    placer.place(arrays.row_slot, rows);
    placer.place(arrays.segment_begin, experts + 1);
    placer.place(arrays.counts, experts);
    placer.place(arrays.chunks, capacity.chunks + 1);
    placer.place(arrays.pieces, capacity.pieces + 1);
    placer.place(arrays.runs, capacity.runs + 1);
    placer.place(arrays.unit_begin, capacity.pieces + 1);
    placer.place(arrays.reused_piece, capacity.reused_blocks);
    placer.place(arrays.idle_experts, experts);
    placer.place(arrays.units, rows);
    placer.place(arrays.row_begin, rows + 1);
    placer.place(arrays.rows, rows);
    placer.place(arrays.ids, slots);
    placer.place(arrays.counters, rows / shape.block_m * kCountersPerBlock + more_counters(shape));
    placer.place(arrays.claims, 2 * kClaimStride);
    placer.place(arrays.block_counts, count_stride(grid.blocks) * experts);
    placer.place(arrays.records, rows);
    placer.place(arrays.token_rows, slots);
    placer.place(arrays.tile_counts, rows / kTileRows);
    placer.place(arrays.round_masks, plan.num_ranks * most_rounds(plan));
    placer.place(arrays.run_before, (capacity.runs + 1) * schedule::kMaxPhases);
    if (bytes != nullptr) *bytes = placer.bytes();
    return arrays;
}

bool pulls_any(const schedule::ScheduleShape& shape) {
    for (int32_t k = 0; k < shape.num_phases; ++k) {
        const schedule::PhaseRule& rule = shape.phases[k];
        if (rule.pulls_first != schedule::Pulled::kNone || rule.pulls_later != schedule::Pulled::kNone) {
            return true;
        }
    }
    return false;
}

/// The part of the parameters that follows from the sizes.
void set_sizes(const Preparation& preparation, const Grid& grid, PrepareParams& params) {
    const PlanShape& plan = preparation.plan;
    const schedule::ScheduleShape& shape = preparation.shape;
    const int64_t rows = worst_case_rows(plan), block = shape.block_m;
    params.plan = plan;
    params.shape = shape;
    params.pulls_any = pulls_any(shape);
    params.is_recompute = shape.sizes.pass == schedule::Pass::kRecompute;
    params.zeroes_first = shape.zeroes_padding(0);
    params.zeroes_later = shape.zeroes_padding(1);
    params.slots = static_cast<uint32_t>(plan.max_tokens * plan.top_k);
    params.most_rounds = static_cast<uint32_t>(most_rounds(plan));
    params.most_tiles = static_cast<uint32_t>(rows / kTileRows);
    params.count_stride = count_stride(grid.blocks);
    // (rounds / 32 warps) x 12000 cycles over experts, from estimates.
    params.round_cost = 375.0f / static_cast<float>(plan.num_local_experts());
    // A tile a warp, if each rank has its share of the routes and each expert a row block of padding.
    const float tile_warps = static_cast<float>(kTileRows * grid.warps);
    params.blocks_per_slot = 1.0f / (tile_warps * static_cast<float>(plan.num_ranks));
    params.more_blocks = static_cast<float>(plan.num_local_experts() * block) / tile_warps;
    params.more_counters = static_cast<uint32_t>(more_counters(shape));
    for (int32_t k = 0; k < shape.num_phases; ++k) params.shared_tasks += shape.shared_tasks(k);
    const int64_t ring = std::min(int64_t{shape.ring_blocks} * block, std::max(rows, block));
    const int64_t piece = std::min(int64_t{shape.max_piece_blocks} * block, ring);
    const auto divisor = [](int64_t value) { return make_divisor(static_cast<uint32_t>(value)); };
    params.top_k = divisor(plan.top_k);
    params.round_slots = divisor(round_slots(plan));
    params.block_rows = divisor(block);
    params.ring_rows = divisor(ring);
    params.piece_rows = divisor(piece);
    params.window_rows = divisor(std::min(int64_t{shape.window_blocks} * block, ring));
    params.stretch_pieces = divisor(ceil_div(ring, piece));
}

PublishedRows published_rows(const StagedRows& rows, const PeerGroup& group) {
    PublishedRows result{};
    result.from = static_cast<const char*>(rows.from);
    result.to = group.window + rows.to_offset;
    result.from_stride = rows.from_stride;
    result.row_bytes = rows.row_bytes;
    return result;
}

/// All but the staged rows.
Published published_by(const Preparation& preparation, const PreparationInputs& inputs) {
    Published published{};
    published.header = inputs.header;
    published.topk_ids = inputs.topk_ids;
    published.ids_are_int64 = inputs.ids_are_int64;
    published.num_experts = preparation.plan.num_experts;
    published.num_slots = inputs.header.num_tokens * preparation.plan.top_k;
    published.ids = reinterpret_cast<int32_t*>(inputs.group.window + inputs.ids_offset);
    return published;
}

void launch_publish(const Preparation& preparation, const PeerGroup& group, const Published& published,
                    int64_t staged_bytes, void* stream) {
    constexpr int64_t kIdsPerThread = 4, kBytesPerThread = 256;
    const int64_t threads =
        std::max(ceil_div(published.num_slots, kIdsPerThread), ceil_div(staged_bytes, kBytesPerThread));
    int64_t most = 2 * int64_t{num_multiprocessors()};
    if (preparation.most_blocks > 0) most = preparation.most_blocks;
    const int64_t blocks = std::clamp<int64_t>(ceil_div<int64_t>(threads, kPublishThreads), 1, most);
    launch("mok's publishing kernel", publish_kernel, {static_cast<uint32_t>(blocks), kPublishThreads},
           stream, PublishParams{group, published});
}

schedule::PreparedCall launch_kernel(const Preparation& preparation, const PreparationInputs& inputs,
                                     const Grid& grid, const Published& published, bool publishes,
                                     void* scratch, void* stream, uint64_t* times) {
    const bool alone = preparation.plan.num_ranks == 1;
    PrepareParams params{};
    set_sizes(preparation, grid, params);
    params.arrays = place_arrays(preparation, scratch, nullptr);
    params.group = inputs.group;
    params.limits = inputs.limits;
    params.published = published;
    params.publishes = publishes;
    params.num_tokens = inputs.header.num_tokens;
    params.topk_ids = inputs.topk_ids;
    params.ids_are_int64 = inputs.ids_are_int64;
    params.ids_offset = inputs.ids_offset;
    params.row_bytes = preparation.shape.sizes.row_bytes;
    params.own_x = static_cast<const char*>(inputs.x.data);
    params.own_x_stride = inputs.x.stride;
    params.own_dout = static_cast<const char*>(inputs.dout.data);
    params.own_dout_stride = inputs.dout.stride;
    params.barrier = &control_head(inputs.group.window)->device.grid_barrier;
    params.times = times;
    LaunchShape shape{grid.blocks, grid.warps * ptx::kWarpThreads};
    shape.shared_bytes = grid.shared_bytes;
    shape.cooperative = grid.blocks > 1 && (!grid.is_small || publishes);
    launch("mok's preparation kernel", grid.is_small ? prepare_kernel<true> : prepare_kernel<false>, shape,
           stream, params);

    const PrepareArrays& arrays = params.arrays;
    schedule::PreparedCall call{};
    call.expired = inputs.limits.expired;
    call.table = arrays.table;
    call.units = arrays.pulls;
    call.ranks = arrays.ranks;
    call.row_peer = arrays.row_peer;
    call.row_slot = arrays.row_slot;
    call.ids = alone ? arrays.ids : reinterpret_cast<int32_t*>(inputs.group.window + inputs.ids_offset);
    call.counters = arrays.counters;
    call.task_claim = arrays.claims;
    call.pull_claim = arrays.claims + kClaimStride;
    return call;
}

}  // namespace

void load_prepare_kernels() {
    load_kernel("loading mok's publishing kernel", publish_kernel);
    load_kernel("loading mok's preparation kernel", prepare_kernel<true>);
    load_kernel("loading mok's preparation kernel", prepare_kernel<false>);
}

int64_t preparation_bytes(const Preparation& preparation) {
    int64_t bytes = 0;
    place_arrays(preparation, nullptr, &bytes);
    return bytes;
}

int64_t preparation_stamps(const Preparation& preparation) {
    return int64_t{grid_of(preparation).blocks} * kPrepareStamps;
}

schedule::PreparedCall launch_prepare(const Preparation& preparation, const PreparationInputs& inputs,
                                      void* scratch, void* stream, uint64_t* times) {
    return launch_kernel(preparation, inputs, grid_of(preparation), published_by(preparation, inputs), false,
                         scratch, stream, times);
}

schedule::PreparedCall launch_publish_and_prepare(const Preparation& preparation,
                                                  const PreparationInputs& inputs, const StagedRows& x,
                                                  const StagedRows& dout, void* scratch, void* stream,
                                                  uint64_t* times) {
    const Grid grid = grid_of(preparation);
    Published published = published_by(preparation, inputs);
    published.x = published_rows(x, inputs.group);
    published.dout = published_rows(dout, inputs.group);
    int64_t bytes = 0;
    for (const StagedRows* rows : {&x, &dout}) {
        if (rows->from != nullptr) bytes += inputs.header.num_tokens * rows->row_bytes;
    }
    // One block publishes ids as fast as a launch starts, but it would take longer for rows.
    const bool publishes = grid.is_small && bytes == 0;
    if (!publishes) launch_publish(preparation, inputs.group, published, bytes, stream);
    return launch_kernel(preparation, inputs, grid, published, publishes, scratch, stream, times);
}

}  // namespace mok::launch
