#include "csrc/schedule/host_schedule.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "csrc/layout/check.h"

namespace mok::schedule {

void check_schedule(const PlanShape& plan_shape, const ScheduleSizes& sizes, const KernelConfig& config) {
    check_plan_shape(plan_shape);
    MOK_CHECK(sizes.hidden >= 1, "hidden = ", sizes.hidden, ": must be at least 1.");
    MOK_CHECK(sizes.intermediate >= 1, "intermediate = ", sizes.intermediate, ": must be at least 1.");
    MOK_CHECK(sizes.shared_intermediate >= 0, "shared_intermediate = ", sizes.shared_intermediate,
              ": must not be negative; 0 means no shared expert.");
    MOK_CHECK(sizes.num_sms >= 1, "num_sms = ", sizes.num_sms, ": must be at least 1.");
    // So every row block has a valid row: its pulls are what makes its tasks wait for the ring.
    MOK_CHECK(plan_shape.pad == config.block_m, "pad = ", plan_shape.pad, ": must equal the ", config.block_m,
              " rows of a row block.");
    MOK_CHECK(sizes.ring_rows >= plan_shape.pad && sizes.ring_rows % plan_shape.pad == 0,
              "ring_rows = ", sizes.ring_rows, ": must be a positive multiple of the pad ", plan_shape.pad,
              ".");
    MOK_CHECK(worst_case_rows(plan_shape) <= std::numeric_limits<int32_t>::max(),
              "max_tokens = ", plan_shape.max_tokens, " on ", plan_shape.num_ranks,
              " ranks with top_k = ", plan_shape.top_k,
              ": a rank's rows must fit in 32 bits; pass fewer tokens per call.");
}

HostSchedule::HostSchedule(const PlanShape& plan_shape, const ScheduleShape& shape, Plan plan,
                           bool dedup_across_chunks)
    : shape_(shape), plan_(std::move(plan)) {
    fill_table();
    fill_units(plan_shape, dedup_across_chunks);
    fill_runs();
}

PullUnits HostSchedule::units() const {
    return PullUnits{units_.data(), row_begin_.data(), rows_.data(), static_cast<int32_t>(units_.size())};
}

void HostSchedule::fill_table() {
    const TableCapacity capacity = table_capacity(shape_, plan_.num_rows());
    chunks_.resize(capacity.chunks + 1);
    pieces_.resize(capacity.pieces + 1);
    runs_.resize(capacity.runs + 1);
    unit_begin_.assign(capacity.pieces + 1, 0);
    table_.chunks = chunks_.data();
    table_.pieces = pieces_.data();
    table_.runs = runs_.data();
    table_.unit_begin = unit_begin_.data();
    table_.segment_begin = plan_.segment_begin.data();
    table_.counts = plan_.counts.data();
    for (int32_t expert = 0; expert < shape_.sizes.num_local_experts; ++expert) {
        if (plan_.counts[expert] == 0) idle_experts_.push_back(expert);
    }
    table_.idle_experts = idle_experts_.data();
    table_.num_idle = static_cast<int32_t>(idle_experts_.size());
    fill_chunks(shape_, table_);
    reused_piece_.resize(table_.num_reused(shape_));
    table_.reused_piece = reused_piece_.data();
    PieceCount total{0, 0};
    for (int32_t expert = 0; expert < shape_.sizes.num_local_experts; ++expert) {
        fill_pieces(shape_, table_, expert, total);
        const PieceCount count = pieces_of_segment(shape_, table_, expert);
        total.pieces += count.pieces;
        total.spans += count.spans;
    }
    end_pieces(shape_, table_, total);
}

void HostSchedule::fill_units(const PlanShape& plan_shape, bool dedup_across_chunks) {
    bool any = false;
    for (int32_t k = 0; k < shape_.num_phases; ++k) {
        any = any || shape_.phases[k].pulls_first != Pulled::kNone ||
              shape_.phases[k].pulls_later != Pulled::kNone;
    }
    if (!any) {
        row_begin_.push_back(0);
        return;
    }
    // One entry per unit in order of first rows, its rows chained: next_row[row] is the unit's next row.
    struct Unit {
        int32_t peer, token, first_row, last_row, group;
    };
    const int64_t num_rows = static_cast<int64_t>(table_.num_blocks) * shape_.block_m;
    std::vector<int32_t> next_row(num_rows, -1);
    std::vector<int32_t> unit_of(plan_shape.num_ranks * plan_shape.max_tokens, -1);
    std::vector<Unit> found, all;
    int32_t chunk_first_unit = 0;
    for (int32_t p = 0; p < table_.num_pieces; ++p) {
        const Piece& piece = pieces_[p];
        if (piece.begin == chunks_[piece.chunk].begin && !dedup_across_chunks) {
            chunk_first_unit = static_cast<int32_t>(all.size());
        }
        unit_begin_[p] = static_cast<int32_t>(all.size());
        found.clear();
        // A unit made earlier in this piece or chunk takes the row; `all` holds finished pieces, `found` this
        // one.
        for (int32_t block = piece.begin; block < piece.end; ++block) {
            int32_t zero_unit = -1;
            for (int32_t row = block * shape_.block_m; row < (block + 1) * shape_.block_m; ++row) {
                const int32_t peer = plan_.row_peer[row];
                if (peer < 0 && !shape_.zeroes_padding(piece.chunk)) continue;
                const int32_t token = peer < 0 ? 0 : plan_.row_slot[row] / plan_shape.top_k;
                const int32_t base = static_cast<int32_t>(all.size());
                int32_t& known = peer < 0 ? zero_unit : unit_of[peer * plan_shape.max_tokens + token];
                if (known >= chunk_first_unit && known >= 0) {
                    Unit& unit = known < base ? all[known] : found[known - base];
                    next_row[unit.last_row] = row;
                    unit.last_row = row;
                    continue;
                }
                known = base + static_cast<int32_t>(found.size());
                const int32_t source = peer < 0 ? kZeroSource : peer;
                found.push_back(
                    Unit{source, token, row, row,
                         pull_group(shape_, piece, block, plan_shape.rank, plan_shape.num_ranks, source)});
            }
        }
        // Units move when their piece is sorted: unit_of follows.
        std::stable_sort(found.begin(), found.end(),
                         [](const Unit& a, const Unit& b) { return a.group < b.group; });
        for (const Unit& unit : found) {
            if (unit.peer != kZeroSource) {
                unit_of[unit.peer * plan_shape.max_tokens + unit.token] = static_cast<int32_t>(all.size());
            }
            all.push_back(unit);
        }
    }
    unit_begin_[table_.num_pieces] = static_cast<int32_t>(all.size());
    units_.reserve(all.size());
    rows_.reserve(num_rows);
    row_begin_.reserve(all.size() + 1);
    for (const Unit& unit : all) {
        units_.push_back(PullUnit{unit.peer, unit.token});
        row_begin_.push_back(static_cast<int32_t>(rows_.size()));
        for (int32_t row = unit.first_row; row >= 0; row = next_row[row]) rows_.push_back(row);
    }
    row_begin_.push_back(static_cast<int32_t>(rows_.size()));
}

void HostSchedule::fill_runs() {
    for (int32_t piece = 0; piece < table_.num_pieces; ++piece) {
        for (int32_t k = 0; k < shape_.num_phases; ++k) {
            const PlacedRun placed = place_run(shape_, table_, piece, k);
            runs_[placed.index] = placed.run;
            runs_[placed.index].pull_begin = run_pulls(shape_, table_, placed.before);
        }
    }
    table_.num_routed_tasks = 0;
    table_.num_pulls = 0;
    for (int32_t k = 0; k < shape_.num_phases; ++k) {
        table_.num_shared_tasks += shape_.shared_tasks(k);
        table_.num_routed_tasks += tasks_before(shape_, table_, k, table_.num_pieces);
        table_.num_pulls += pulls_before(shape_, table_, k, table_.num_pieces);
    }
    runs_[table_.num_runs] = Run{table_.num_routed_tasks, table_.num_pulls, table_.num_pieces, 0};
}

}  // namespace mok::schedule
