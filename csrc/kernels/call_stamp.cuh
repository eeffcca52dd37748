// One thread notes the time on a traced call's stream, and what the call's table says of its length.
#pragma once

#include "csrc/kernels/task_span.h"
#include "csrc/ptx/ptx.h"
#include "csrc/schedule/prepared.h"
#include "csrc/schedule/tasks.h"

namespace mok {

struct CallStampParams {
    CallStamps* stamps;
    CallMoment moment;
    schedule::ScheduleShape shape;
    const schedule::Table* table;  // null, or one that this stream's earlier work has made,
    const uint32_t* expired;       // unless this is set
};

__global__ void call_stamp_kernel(const __grid_constant__ CallStampParams params) {
    if (ptx::thread_idx() != 0) return;
    ptx::store_global(&params.stamps->moments[static_cast<int32_t>(params.moment)], ptx::timer_ns());
    if (params.table == nullptr || ptx::load_global(params.expired) != 0) return;
    const schedule::Table& table = *params.table;
    ptx::store_global(&params.stamps->num_tasks, schedule::num_tasks(params.shape, table));
    ptx::store_global(&params.stamps->num_pulls, table.num_pulls);
}

}  // namespace mok
