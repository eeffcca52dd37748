// The host's schedule of one rank: plan, pull units and table, filled by loops over the functions that a
// device kernel runs in parallel.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/layout/plan_host.h"
#include "csrc/schedule/pull.h"

namespace mok::schedule {

/// Checks that sizes are positive, the pad is a row block and ring_rows whole row blocks; throws
/// std::invalid_argument.
void check_schedule(const PlanShape& plan_shape, const ScheduleSizes& sizes, const KernelConfig& config);

class HostSchedule {
  public:
    /// `dedup_across_chunks` breaks the rule of pull.h; the simulator shows what happens then.
    HostSchedule(const PlanShape& plan_shape, const ScheduleShape& shape, Plan plan,
                 bool dedup_across_chunks = false);
    HostSchedule(const HostSchedule&) = delete;
    HostSchedule& operator=(const HostSchedule&) = delete;

    const ScheduleShape& shape() const { return shape_; }
    const Table& table() const { return table_; }
    const Plan& plan() const { return plan_; }
    PullUnits units() const;

  private:
    void fill_table();
    void fill_units(const PlanShape& plan_shape, bool dedup_across_chunks);
    void fill_runs();

    ScheduleShape shape_;
    Plan plan_;
    Table table_{};
    std::vector<Chunk> chunks_;
    std::vector<Piece> pieces_;
    std::vector<Run> runs_;
    std::vector<int32_t> unit_begin_;
    std::vector<int32_t> reused_piece_;
    std::vector<int32_t> idle_experts_;
    std::vector<PullUnit> units_;
    std::vector<int32_t> row_begin_;
    std::vector<int32_t> rows_;
};

}  // namespace mok::schedule
