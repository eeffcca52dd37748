// The run itself: agents, waits, signals, hosts. CTAs are in sim_cta.cpp, pull warps in sim_pull.cpp, reports
// in sim_report.cpp.
#include "csrc/schedule/simulator.h"

#include <algorithm>

#include "csrc/layout/check.h"

namespace mok::schedule {

Simulator::Simulator(const SimProblem& problem, const Bug& bug)
    : num_experts_(problem.num_experts), top_k_(problem.top_k), ids_(problem.ids) {
    MOK_CHECK(!ids_.empty(), "ids is empty: pass one [T, K] array per rank.");
    for (int32_t rank = 0; rank < static_cast<int32_t>(ids_.size()); ++rank) {
        models_.emplace_back(problem, rank, bug);
    }
    options_.bug = bug;
}

SimResult Simulator::run(const SimOptions& options) {
    return execute(options, nullptr);
}

SimResult Simulator::run_timed(const SimOptions& options, const SimCosts& costs) {
    return execute(options, &costs);
}

SimResult Simulator::execute(const SimOptions& options, const SimCosts* costs) {
    costs_ = costs;
    reset(options);
    for (int32_t rank = 0; rank < agents_.num_ranks; ++rank) wake(agents_.host(rank));
    while (result_.errors.size() < kMaxErrors) {
        const int32_t agent = costs_ != nullptr ? clock_.pick() : adversary_.pick();
        if (agent < 0) break;
        status_[agent] = Agent::kIdle;
        ++result_.stats.steps;
        step(agent);
    }
    finish();
    return std::move(result_);
}

void Simulator::reset(const SimOptions& options) {
    const Bug bug = options_.bug;
    options_ = options;
    options_.bug = bug;
    MOK_CHECK(options.num_ctas >= 1, "num_ctas = ", options.num_ctas, ": must be at least 1.");
    MOK_CHECK(options.pull_batch >= 1, "pull_batch = ", options.pull_batch, ": must be at least 1.");
    if (options_.resident_ctas < 0) options_.resident_ctas = options.num_ctas;
    MOK_CHECK(options_.resident_ctas >= 1 && options_.resident_ctas <= options.num_ctas,
              "resident_ctas = ", options_.resident_ctas, ": must lie in [1, ", options.num_ctas,
              "]; with none the kernel never starts.");
    result_ = SimResult{};
    agents_ = AgentIds{static_cast<int32_t>(models_.size()), options.num_ctas};
    adversary_.reset(agents_, options_);
    clock_ = Clock{};
    status_.assign(agents_.num_agents(), Agent::kIdle);
    waiting_.assign(agents_.num_agents(), Waiting{});
    num_published_ = num_ended_ = 0;
    ranks_.resize(models_.size());
    for (size_t r = 0; r < models_.size(); ++r) {
        const RankModel& model = models_[r];
        RankState& rank = ranks_[r];
        rank.model = &model;
        rank.memory.reset(model);
        rank.counters.assign(model.finals.size(), 0);
        rank.first_waiter.assign(model.finals.size(), kNone);
        rank.executed.assign(model.tasks.size(), 0);
        rank.home.assign(ids_[r].size(), 0);
        rank.home_router.assign(ids_[r].size(), 0);
        rank.gradients.assign(model.gradient_parts.size(), 0);
        rank.accumulators.assign(model.shape().routed.span_tiles(), 0);
        rank.ctas.assign(options.num_ctas, Cta{});
        rank.next_claim = rank.next_pull = 0;
        rank.num_exited = 0;
        rank.host = Host::kPublish;
        rank.published = false;
        rank.link_free = 0;
        result_.errors.insert(result_.errors.end(), model.errors.begin(), model.errors.end());
        result_.stats.tasks += static_cast<int64_t>(model.tasks.size());
        result_.stats.pulls += model.table().num_pulls;
        result_.stats.units += model.units.num_units;
        result_.stats.chunks += model.table().num_chunks;
    }
}

void Simulator::step(int32_t agent) {
    RankState& rank = ranks_[agents_.rank(agent)];
    const int32_t cta = agents_.cta(agent);
    switch (agents_.role(agent)) {
        case Role::kArrive:
            return step_arrival(rank, cta);
        case Role::kProducer:
            return step_producer(rank, cta);
        case Role::kConsumer:
            return step_consumer(rank, cta);
        case Role::kStore0:
            return step_store(rank, cta, 0);
        case Role::kStore1:
            return step_store(rank, cta, 1);
        case Role::kPull:
            return step_pull(rank, cta);
        case Role::kPullDone:
            return step_pull_done(rank, cta);
        case Role::kHost:
            return step_host(rank);
    }
}

void Simulator::wake(int32_t agent) {
    if (status_[agent] != Agent::kIdle) return;
    status_[agent] = Agent::kEnabled;
    if (costs_ != nullptr) {
        clock_.enable(agent, delay(agent));
    } else {
        adversary_.enable(agent);
    }
}

double Simulator::delay(int32_t agent) {
    RankState& rank = ranks_[agents_.rank(agent)];
    const Role role = agents_.role(agent);
    if (role == Role::kHost) return rank.host == Host::kStart ? rank.model->rank * costs_->launch : 0;
    Cta& cta = rank.ctas[agents_.cta(agent)];
    switch (role) {
        case Role::kProducer:
            return cta.claimed == kNone ? costs_->claim : 0;
        case Role::kConsumer: {
            const Task& task = rank.model->tasks[cta.started[0]];
            const double cost = costs_->tile[static_cast<int32_t>(task.kind)];
            cta.consumer_began = clock_.now();
            return task.is_gradient() ? cost * (task.end - task.begin) : cost;
        }
        case Role::kStore0:
        case Role::kStore1:
            return cta.streams[role == Role::kStore1 ? 1 : 0].issued != kNone ? costs_->store : 0;
        case Role::kPull:
            return pull_delay(rank, cta);
        case Role::kPullDone:
            return costs_->store;
        default:
            return 0;
    }
}

void Simulator::wait_on(int32_t agent, int64_t counter, int32_t target) {
    RankState& rank = ranks_[agents_.rank(agent)];
    status_[agent] = Agent::kWaiting;
    waiting_[agent] = Waiting{counter, target, rank.first_waiter[counter]};
    rank.first_waiter[counter] = agent;
    ++result_.stats.waits;
}

bool Simulator::await(int32_t agent, RankState& rank, const Wait* waits, int32_t num_waits) {
    for (int32_t w = 0; w < num_waits; ++w) {
        const Wait& wait = waits[w];
        if (options_.bug.is(BugKind::kDropWait, wait.counter)) continue;
        const int32_t shift = options_.bug.is(BugKind::kShiftWait, wait.counter) ? 1 : 0;
        for (int32_t index = wait.first; index < wait.last; ++index) {
            const int64_t counter = rank.model->counter(wait.counter, index);
            const int32_t target =
                (wait.target == kFinal ? rank.model->finals[counter] : wait.target) - shift;
            if (rank.counters[counter] >= target) continue;
            wait_on(agent, counter, target);
            return false;
        }
    }
    return true;
}

void Simulator::signal(RankState& rank, Counter counter, int32_t index, int32_t count) {
    const RankModel& model = *rank.model;
    if (options_.bug.is(BugKind::kNeverSignal, counter)) {
        const bool by_block = counter != Counter::kSpanRead && counter != Counter::kAccumulator;
        const int32_t block = index - model.shape().num_shared_blocks;
        if (by_block ? block >= 0 && block < model.table().first_chunk_end() : index == 0) return;
    }
    const int64_t at = model.counter(counter, index);
    const int32_t value = rank.counters[at] += count;
    int32_t* link = &rank.first_waiter[at];
    while (*link != kNone) {
        const int32_t agent = *link;
        if (waiting_[agent].target > value) {
            link = &waiting_[agent].next;
            continue;
        }
        *link = waiting_[agent].next;
        status_[agent] = Agent::kIdle;
        wake(agent);
    }
}

void Simulator::step_host(RankState& rank) {
    const int32_t own = agents_.host(rank.model->rank);
    const auto wake_hosts = [&] {
        for (int32_t r = 0; r < agents_.num_ranks; ++r) wake(agents_.host(r));
    };
    switch (rank.host) {
        case Host::kPublish:
            rank.published = true;
            rank.host = Host::kStart;
            if (++num_published_ == agents_.num_ranks) wake_hosts();
            if (options_.bug.is(BugKind::kSkipStartBarrier)) wake(own);
            return;
        case Host::kStart:
            rank.host = Host::kRunning;
            start_kernel(rank);
            return;
        case Host::kEnd:
            rank.host = Host::kCombine;
            if (++num_ended_ == agents_.num_ranks) wake_hosts();
            if (options_.bug.is(BugKind::kSkipEndBarrier)) wake(own);
            return;
        case Host::kCombine:
            combine(rank);
            rank.host = Host::kDone;
            return;
        case Host::kRunning:
        case Host::kDone:
            return;
    }
}

void Simulator::start_kernel(RankState& rank) {
    for (int32_t cta = 0; cta < options_.num_ctas; ++cta) {
        if (cta < options_.resident_ctas) {
            step_arrival(rank, cta);
        } else if (!options_.late_after_exit) {
            wake(agents_.agent(rank.model->rank, cta, Role::kArrive));
        }
    }
}

void Simulator::step_arrival(RankState& rank, int32_t cta) {
    rank.ctas[cta].arrived = true;
    rank.ctas[cta].consumer_ended = clock_.now();
    wake(agents_.agent(rank.model->rank, cta, Role::kProducer));
    wake(agents_.agent(rank.model->rank, cta, Role::kPull));
}

void Simulator::maybe_exit(RankState& rank, int32_t cta_idx) {
    Cta& cta = rank.ctas[cta_idx];
    if (cta.exited || !cta.no_more_tasks || cta.num_started > 0 || !cta.no_more_pulls || cta.num_pending > 0)
        return;
    for (const Stream& stream : cta.streams) {
        if (stream.staged != kNone || stream.issued != kNone) return;
    }
    cta.exited = true;
    if (++rank.num_exited == options_.num_ctas) {
        rank.host = Host::kEnd;
        wake(agents_.host(rank.model->rank));
        return;
    }
    if (!options_.late_after_exit) return;
    for (int32_t late = options_.resident_ctas; late < options_.num_ctas; ++late) {
        const int32_t agent = agents_.agent(rank.model->rank, late, Role::kArrive);
        if (rank.ctas[late].arrived || status_[agent] != Agent::kIdle) continue;
        wake(agent);
        return;
    }
}

}  // namespace mok::schedule
