// A CTA's producer, consumer and store streams.
#include "csrc/layout/check.h"
#include "csrc/schedule/simulator.h"

namespace mok::schedule {

int32_t Simulator::stream_parts(const RankModel& model, int32_t task_idx, int32_t stream) const {
    // Parts are dealt to the two streams in turn.
    return (model.parts[task_idx] + 1 - stream) / 2;
}

bool Simulator::can_consume(const RankState& rank, const Cta& cta) const {
    if (cta.num_started == 0) return false;
    for (int32_t s = 0; s < 2; ++s) {
        if (cta.streams[s].staged != kNone && stream_parts(*rank.model, cta.started[0], s) > 0) return false;
    }
    return true;
}

void Simulator::step_producer(RankState& rank, int32_t cta_idx) {
    Cta& cta = rank.ctas[cta_idx];
    const int32_t own = agents_.agent(rank.model->rank, cta_idx, Role::kProducer);
    if (cta.claimed != kNone) {
        if (cta.num_started == kDepth) return;  // the consumer wakes us
        start_task(rank, cta_idx);
        return;
    }
    if (cta.no_more_tasks) return;
    const int64_t num_tasks = static_cast<int64_t>(rank.model->tasks.size());
    const int64_t claim = rank.next_claim++;
    int64_t index = claim;
    if (options_.bug.is(BugKind::kClaimTwice) && claim > num_tasks / 2) --index;
    if (options_.bug.is(BugKind::kLoseTask) && claim >= num_tasks / 2) ++index;
    if (index >= num_tasks) {
        cta.no_more_tasks = true;
        maybe_exit(rank, cta_idx);
        return;
    }
    const std::vector<int32_t>& order = rank.model->order;
    cta.claimed = order.empty() ? static_cast<int32_t>(index) : order[index];
    cta.waited_for = kNone;
    wake(own);
}

void Simulator::start_task(RankState& rank, int32_t cta_idx) {
    Cta& cta = rank.ctas[cta_idx];
    const RankModel& model = *rank.model;
    const Task& task = model.tasks[cta.claimed];
    const int32_t own = agents_.agent(model.rank, cta_idx, Role::kProducer);
    Wait waits[kMaxWaits];
    const int32_t num_waits = task_waits(model.shape(), task, waits);
    if (options_.bug.is(BugKind::kFirstBlockOnly) && task.is_gradient()) {
        for (int32_t w = 0; w < num_waits; ++w) waits[w].last = waits[w].first + 1;
    }
    for (int32_t w = 0; w < num_waits; ++w) {
        if (!await(own, rank, waits + w, 1)) {
            cta.waited_for = static_cast<int32_t>(waits[w].counter);
            return;
        }
    }
    if (++rank.executed[cta.claimed] > 1) {
        fail(Violation{"tile twice", task.begin, 1, 2, "starts a task that another CTA has started"}, rank,
             cta_idx, Role::kProducer, describe(task));
    }
    const int32_t reads = task_access(model.shape(), task).reads;
    for (int32_t b = 0; b < kNumBuffers; ++b) {
        for (int32_t block = task.begin; (reads >> b & 1) != 0 && block < task.end; ++block) {
            const Violation violation = rank.memory.begin_read(static_cast<Buffer>(b), task.shared, block);
            if (violation.type != nullptr) fail(violation, rank, cta_idx, Role::kProducer, describe(task));
        }
    }
    if (task.cut_ordinal >= 0) {
        const int32_t expected = task.cut_ordinal * model.parts[cta.claimed];
        const int32_t seen = rank.accumulators[task.span_tile];
        if (seen != expected) {
            fail(Violation{"accumulator out of order", task.begin, expected, seen,
                           concat("continues an accumulator of which ", seen, " of ", expected,
                                  " parts are stored")},
                 rank, cta_idx, Role::kProducer, describe(task));
        }
    }
    Signal signals[kMaxSignals];
    const int32_t num_signals = task_signals(model.shape(), task, signals);
    for (int32_t i = 0; i < num_signals; ++i) {
        if (signals[i].when == When::kRead && signals_early(signals[i].counter)) {
            signal(rank, signals[i].counter, signals[i].index, 1);
        }
    }
    cta.started_waited_for[cta.num_started] = cta.waited_for;
    cta.started[cta.num_started++] = cta.claimed;
    cta.claimed = kNone;
    if (can_consume(rank, cta)) wake(agents_.agent(model.rank, cta_idx, Role::kConsumer));
    wake(own);
}

void Simulator::step_consumer(RankState& rank, int32_t cta_idx) {
    Cta& cta = rank.ctas[cta_idx];
    const RankModel& model = *rank.model;
    const int32_t task_idx = cta.started[0];
    const Task& task = model.tasks[task_idx];
    const int32_t reads = task_access(model.shape(), task).reads;
    for (int32_t b = 0; b < kNumBuffers; ++b) {
        for (int32_t block = task.begin; (reads >> b & 1) != 0 && block < task.end; ++block) {
            const Violation violation = rank.memory.end_read(static_cast<Buffer>(b), task.shared, block);
            if (violation.type != nullptr) fail(violation, rank, cta_idx, Role::kConsumer, describe(task));
        }
    }
    Signal signals[kMaxSignals];
    const int32_t num_signals = task_signals(model.shape(), task, signals);
    for (int32_t i = 0; i < num_signals; ++i) {
        if (signals[i].when == When::kRead && !signals_early(signals[i].counter)) {
            signal(rank, signals[i].counter, signals[i].index, 1);
        }
    }
    if (costs_ != nullptr && options_.timeline) {
        result_.timeline.push_back(TimelineEntry{
            model.rank, cta_idx, task.kind, task.shared, task.begin, task.n_tile, cta.consumer_began,
            clock_.now(), cta.consumer_began - cta.consumer_ended, cta.started_waited_for[0]});
    }
    if (costs_ != nullptr) {
        result_.stats.busy += clock_.now() - cta.consumer_began;
        cta.consumer_ended = clock_.now();
    }
    for (int32_t s = 0; s < 2; ++s) {
        if (stream_parts(model, task_idx, s) == 0) continue;
        cta.streams[s].staged = task_idx;
        wake(agents_.agent(model.rank, cta_idx, s == 0 ? Role::kStore0 : Role::kStore1));
    }
    --cta.num_started;
    for (int32_t i = 0; i < cta.num_started; ++i) {
        cta.started[i] = cta.started[i + 1];
        cta.started_waited_for[i] = cta.started_waited_for[i + 1];
    }
    if (can_consume(rank, cta)) wake(agents_.agent(model.rank, cta_idx, Role::kConsumer));
    wake(agents_.agent(model.rank, cta_idx, Role::kProducer));
}

void Simulator::step_store(RankState& rank, int32_t cta_idx, int32_t stream_idx) {
    Cta& cta = rank.ctas[cta_idx];
    Stream& stream = cta.streams[stream_idx];
    const int32_t own =
        agents_.agent(rank.model->rank, cta_idx, stream_idx == 0 ? Role::kStore0 : Role::kStore1);
    if (stream.issued == kNone) {
        stream.issued = stream.staged;
        stream.staged = kNone;
        issue_store(rank, cta_idx, stream.issued, stream_parts(*rank.model, stream.issued, stream_idx));
        if (can_consume(rank, cta)) wake(agents_.agent(rank.model->rank, cta_idx, Role::kConsumer));
        wake(own);
        return;
    }
    const int32_t task_idx = stream.issued;
    complete_store(rank, cta_idx, task_idx, stream_idx, stream_parts(*rank.model, task_idx, stream_idx));
    stream.issued = kNone;
    if (stream.staged != kNone) wake(own);
    maybe_exit(rank, cta_idx);
}

void Simulator::signal_stored(RankState& rank, const Task& task, int32_t stream, int32_t parts) {
    Signal signals[kMaxSignals];
    const int32_t num_signals = task_signals(rank.model->shape(), task, signals);
    if (options_.bug.is(BugKind::kSignalOncePerTile)) parts = stream == 0 ? 1 : 0;
    for (int32_t i = 0; i < num_signals; ++i) {
        if (signals[i].when == When::kStored && parts > 0 && !signals_early(signals[i].counter)) {
            signal(rank, signals[i].counter, signals[i].index, parts);
        }
    }
}

void Simulator::issue_store(RankState& rank, int32_t cta_idx, int32_t task_idx, int32_t parts) {
    const RankModel& model = *rank.model;
    const Task& task = model.tasks[task_idx];
    const int32_t writes = task_access(model.shape(), task).writes;
    const int32_t stream = rank.ctas[cta_idx].streams[0].issued == task_idx ? 0 : 1;
    for (int32_t b = 0; b < kNumBuffers; ++b) {
        if ((writes >> b & 1) == 0) continue;
        const Violation violation = rank.memory.begin_write(static_cast<Buffer>(b), task.shared, task.begin);
        if (violation.type != nullptr) {
            fail(violation, rank, cta_idx, stream == 0 ? Role::kStore0 : Role::kStore1, describe(task));
        }
    }
    Signal signals[kMaxSignals];
    const int32_t num_signals = task_signals(model.shape(), task, signals);
    for (int32_t i = 0; i < num_signals; ++i) {
        if (signals[i].when == When::kStored && signals_early(signals[i].counter)) {
            signal(rank, signals[i].counter, signals[i].index, parts);
        }
    }
}

void Simulator::complete_store(RankState& rank, int32_t cta_idx, int32_t task_idx, int32_t stream,
                               int32_t parts) {
    const RankModel& model = *rank.model;
    const Task& task = model.tasks[task_idx];
    const Role role = stream == 0 ? Role::kStore0 : Role::kStore1;
    const int32_t writes = task_access(model.shape(), task).writes;
    for (int32_t b = 0; b < kNumBuffers; ++b) {
        if ((writes >> b & 1) == 0) continue;
        const Violation violation =
            rank.memory.end_write(static_cast<Buffer>(b), task.shared, task.begin, parts);
        if (violation.type != nullptr) fail(violation, rank, cta_idx, role, describe(task));
    }
    if (task.is_gradient() || task.kind == TaskKind::kZeroGrad) {
        if (task.cut_ordinal >= 0) rank.accumulators[task.span_tile] += parts;
        const bool stored = task.kind != TaskKind::kZeroGrad || !options_.bug.is(BugKind::kSkipZero);
        const int32_t expert = task.shared ? model.shape().sizes.num_local_experts : task.expert;
        if (stored && !task.unfinished) {
            rank.gradients[static_cast<int64_t>(expert) * model.gradient_stride + task.span_tile] += parts;
        }
    } else if (!task.shared) {
        store_home(rank, cta_idx, task, stream);
    }
    signal_stored(rank, task, stream, parts);
}

void Simulator::store_home(RankState& rank, int32_t cta_idx, const Task& task, int32_t stream) {
    const RankModel& model = *rank.model;
    const ScheduleShape& shape = model.shape();
    const bool router = stream == 0 && finishes_router_gradient(shape, task);
    const bool rows = task.kind == TaskKind::kDown || task.kind == TaskKind::kDx;
    if (!router && !rows) return;
    const Plan& plan = model.schedule->plan();
    const int64_t first = static_cast<int64_t>(task.begin) * shape.block_m;
    for (int32_t i = 0; i < shape.block_m; ++i) {
        const int32_t peer = plan.row_peer[first + i];
        if (peer < 0) continue;
        RankState& home = ranks_[peer];
        const int32_t slot = plan.row_slot[first + i];
        if (!home.published) {
            fail(Violation{"stored before the peer entered the call", task.begin, 1, 0,
                           concat("sends a row home to rank ", peer, ", which has not published its inputs")},
                 rank, cta_idx, stream == 0 ? Role::kStore0 : Role::kStore1, describe(task));
            return;
        }
        if (rows && i / shape.rows_per_store % 2 == stream) ++home.home[slot];
        if (router) ++home.home_router[slot];
    }
}

}  // namespace mok::schedule
