#include "csrc/schedule/sim_model.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "csrc/layout/check.h"

namespace mok::schedule {

namespace {

PlanShape plan_shape_of(const SimProblem& problem, int32_t rank) {
    int64_t max_tokens = 0;
    for (const auto& ids : problem.ids) {
        max_tokens = std::max<int64_t>(max_tokens, ids.size() / problem.top_k);
    }
    return PlanShape{
        rank,       static_cast<int32_t>(problem.ids.size()), problem.num_experts, problem.top_k, max_tokens,
        problem.pad};
}

constexpr int32_t bit(Buffer buffer) {
    return 1 << buffer;
}

}  // namespace

Access task_access(const ScheduleShape& shape, const Task& task) {
    const int32_t x = task.shared ? 0 : bit(kBufferX), dout = task.shared ? 0 : bit(kBufferDout);
    const int32_t gate_up = bit(kBufferGateUp), hidden = bit(kBufferHidden);
    switch (task.kind) {
        case TaskKind::kGateUp: {
            int32_t writes = shape.sizes.pass == Pass::kForward ? hidden : 0;
            if (shape.backward() || shape.saves_gate_up(task.chunk)) writes |= gate_up;
            return Access{x, writes};
        }
        case TaskKind::kDown:
            return Access{hidden, 0};
        case TaskKind::kDHidden:
            return Access{gate_up | dout, hidden};
        case TaskKind::kDx:
        case TaskKind::kRouterGrad:
            // The bias term of a router gradient is dout . b_down.
            return Access{hidden | (finishes_router_gradient(shape, task) ? dout : 0), 0};
        case TaskKind::kWgradGate:
        case TaskKind::kWgradUp:
            return Access{hidden | x, 0};
        case TaskKind::kWgradDown:
            return Access{hidden | dout, 0};
        case TaskKind::kBiasGate:
        case TaskKind::kBiasUp:
            return Access{hidden, 0};
        case TaskKind::kBiasDown:
            return Access{dout, 0};
        case TaskKind::kZeroGrad:
        case TaskKind::kExit:
            break;
    }
    return Access{0, 0};
}

RankModel::RankModel(const SimProblem& problem, int32_t own_rank, const Bug& bug) : rank(own_rank) {
    const PlanShape plan_shape = plan_shape_of(problem, rank);
    ScheduleSizes sizes = problem.sizes;
    sizes.num_local_experts = plan_shape.num_local_experts();
    sizes.num_tokens = problem.ids[rank].size() / problem.top_k;
    check_schedule(plan_shape, sizes, problem.config);
    ScheduleShape shape = make_schedule_shape(sizes, problem.config);
    if (bug.is(BugKind::kIgnoreReuse)) shape.reuse_blocks = std::numeric_limits<int32_t>::max() / 2;
    if (bug.is(BugKind::kReuseByPiece)) shape.reuse_by_chunk = false;

    std::vector<RankRoutes> routes;
    for (const auto& ids : problem.ids) {
        routes.push_back(RankRoutes{ids.data(), static_cast<int64_t>(ids.size()) / problem.top_k});
    }
    Plan plan;
    build_plan(plan_shape, routes.data(), plan);
    schedule = std::make_unique<HostSchedule>(plan_shape, shape, std::move(plan),
                                              bug.is(BugKind::kDedupAcrossChunks));
    units = schedule->units();
    layout = counter_layout(shape, table());
    for (int32_t c = 0; c < kNumCounters; ++c) {
        for (int64_t i = 0; i < layout.begin[c + 1] - layout.begin[c]; ++i) {
            finals.push_back(final_value(shape, table(), static_cast<Counter>(c), static_cast<int32_t>(i)));
        }
    }
    int32_t hint = 0;
    for (int64_t i = 0; i < num_tasks(shape, table()); ++i) {
        tasks.push_back(decode_task(shape, table(), i, hint));
        parts.push_back(static_cast<int8_t>(task_parts(shape, table(), tasks.back())));
    }
    const ExpertTiles& tiles = shape.routed;
    home_tiles = shape.backward() ? tiles.dx : tiles.down;
    sends_router_gradient = shape.backward() && tiles.dhidden > 0 && shape.wants(kGradientWeights);
    gradient_stride = std::max(tiles.span_tiles(), shape.shared.span_tiles());
    set_buffers(bug);
    count_accesses();
    check_coverage();
    if (bug.is(BugKind::kSwapOrder)) {
        order.resize(tasks.size());
        std::iota(order.begin(), order.end(), 0);
        const TaskKind first = shape.backward() ? TaskKind::kDHidden : TaskKind::kGateUp;
        std::stable_partition(order.begin(), order.end(),
                              [&](int32_t task) { return tasks[task].kind != first; });
    }
}

void RankModel::set_buffers(const Bug& bug) {
    const ScheduleShape& s = shape();
    const int32_t short_by = bug.is(BugKind::kRingShort) && s.ring_blocks > 1 ? 1 : 0;
    for (int32_t b = 0; b < kNumBuffers; ++b) {
        BufferModel& buffer = buffers[b];
        buffer.shared_blocks = s.num_shared_blocks;
        buffer.ring_blocks = s.ring_blocks - short_by;
        const bool saved = (b == kBufferX && s.saves_x(0)) || (b == kBufferGateUp && s.saves_gate_up(0));
        buffer.saved_blocks = saved ? table().first_chunk_end() : 0;
        buffer.saved_is_given = saved && s.backward();
        buffer.shared_is_given = buffer.saved_is_given && b == kBufferGateUp;
        buffer.writes.assign(s.num_shared_blocks + table().num_blocks, 0);
        buffer.reads.assign(buffer.writes.size(), 0);
    }
}

void RankModel::count_accesses() {
    const ScheduleShape& s = shape();
    const int32_t num_experts = s.sizes.num_local_experts + 1;
    gradient_parts.assign(static_cast<int64_t>(num_experts) * gradient_stride, 0);
    for (size_t i = 0; i < tasks.size(); ++i) {
        const Task& task = tasks[i];
        const Access access = task_access(s, task);
        for (int32_t b = 0; b < kNumBuffers; ++b) {
            for (int32_t block = task.begin; block < task.end; ++block) {
                const int32_t index = counter_block(s, task.shared, block);
                if ((access.reads >> b & 1) != 0) ++buffers[b].reads[index];
                if ((access.writes >> b & 1) != 0) buffers[b].writes[index] += parts[i];
            }
        }
    }
    int32_t hint = 0;
    for (int64_t i = 0; i < table().num_pulls; ++i) {
        const PullElement element = decode_pull(s, table(), i, hint);
        pulls.push_back(element);
        BufferModel& buffer = buffers[element.what == Pulled::kX ? kBufferX : kBufferDout];
        for (int32_t r = units.row_begin[element.unit]; r < units.row_begin[element.unit + 1]; ++r) {
            ++buffer.writes[counter_block(s, false, units.rows[r] / s.block_m)];
        }
    }
    const auto expect = [&](bool shared, int32_t expert, const ExpertTiles& tiles, bool idle) {
        for (int32_t t = 0; t < tiles.span_tiles(); ++t) {
            Task task = empty_task(TaskKind::kExit);
            task.shared = shared;
            set_gradient_tile(s, tiles, t, task);
            const bool zeroed = idle && s.sizes.zero_idle;
            gradient_parts[static_cast<int64_t>(expert) * gradient_stride + t] =
                zeroed ? 1 : (idle ? 0 : store_parts(s, gradient_tile_rows(s, task)));
        }
    };
    for (int32_t expert = 0; expert + 1 < num_experts; ++expert) {
        expect(false, expert, s.routed, schedule->plan().counts[expert] == 0);
    }
    if (s.sizes.shared_intermediate > 0) expect(true, num_experts - 1, s.shared, s.num_shared_blocks == 0);
}

/// The task list against loops over what must be computed, written without the schedule's arithmetic.
void RankModel::check_coverage() {
    const ScheduleShape& s = shape();
    using Key =
        std::tuple<TaskKind, bool, int32_t, int32_t, int32_t, int32_t>;  // kind, shared, expert, block, m, n
    std::map<Key, int32_t> missing;
    const auto expect = [&](TaskKind kind, bool shared, int32_t expert, int32_t block, int32_t rows,
                            int32_t columns) {
        for (int32_t m = 0; m < rows; ++m) {
            for (int32_t n = 0; n < columns; ++n) ++missing[Key{kind, shared, expert, block, m, n}];
        }
    };
    const auto expect_block = [&](const ExpertTiles& tiles, bool shared, int32_t expert, int32_t chunk,
                                  int32_t block) {
        const bool made = !s.backward() || !s.saves_gate_up(shared ? 0 : chunk);
        if (made) expect(TaskKind::kGateUp, shared, expert, block, 1, tiles.gate_up);
        expect(TaskKind::kDown, shared, expert, block, 1, tiles.down);
        expect(TaskKind::kDHidden, shared, expert, block, 1, tiles.dhidden);
        expect(TaskKind::kDx, shared, expert, block, 1, tiles.dx);
        expect(TaskKind::kRouterGrad, shared, expert, block, 1, tiles.router);
    };
    const auto expect_span = [&](const ExpertTiles& tiles, bool shared, int32_t expert, int32_t block) {
        const TaskKind wgrads[] = {TaskKind::kWgradGate, TaskKind::kWgradUp, TaskKind::kWgradDown};
        const TaskKind biases[] = {TaskKind::kBiasGate, TaskKind::kBiasUp, TaskKind::kBiasDown};
        for (int32_t m = 0; m < kNumMatrices; ++m) {
            expect(wgrads[m], shared, expert, block, tiles.wgrad_m[m], tiles.wgrad_n[m]);
            expect(biases[m], shared, expert, block, 1, tiles.bias[m]);
        }
    };
    for (int32_t block = 0; block < s.num_shared_blocks; ++block) expect_block(s.shared, true, -1, 0, block);
    if (s.num_shared_blocks > 0) expect_span(s.shared, true, -1, 0);
    const std::vector<int64_t>& begin = schedule->plan().segment_begin;
    int64_t chunk_begin = 0;
    for (int32_t chunk = 0; chunk_begin < begin.back(); ++chunk) {
        const int64_t end =
            chunk_end(chunk_begin, begin.data(), s.sizes.num_local_experts, s.sizes.ring_rows);
        for (int32_t expert = 0; expert < s.sizes.num_local_experts; ++expert) {
            const int64_t first = std::max(begin[expert], chunk_begin),
                          last = std::min(begin[expert + 1], end);
            for (int64_t row = first; row < last; row += s.block_m) {
                expect_block(s.routed, false, expert, chunk, static_cast<int32_t>(row / s.block_m));
            }
            if (first < last) expect_span(s.routed, false, expert, static_cast<int32_t>(first / s.block_m));
        }
        chunk_begin = end;
        if (s.sizes.pass == Pass::kRecompute) break;
    }
    for (const Task& task : tasks) {
        if (task.kind == TaskKind::kZeroGrad) continue;  // their tiles are checked when they are written
        const Key key{task.kind, task.shared, task.expert, task.begin, task.m_tile, task.n_tile};
        if (--missing[key] < 0) {
            errors.push_back(
                SimError{"tile twice", rank, -1, "task list", describe(task), "", 1, 2,
                         concat("rank ", rank, ": the task list has ", describe(task), " twice.")});
        }
    }
    for (const auto& [key, count] : missing) {
        if (count <= 0) continue;
        Task task = empty_task(std::get<0>(key));
        task.shared = std::get<1>(key);
        task.expert = std::get<2>(key);
        task.begin = std::get<3>(key);
        task.m_tile = std::get<4>(key);
        task.n_tile = std::get<5>(key);
        errors.push_back(SimError{"tile missing", rank, -1, "task list", describe(task), "", 1, 0,
                                  concat("rank ", rank, ": the task list lacks ", describe(task), ".")});
    }
}

}  // namespace mok::schedule
