// What a run found: errors, deadlocks, values that are wrong at the end.
#include <algorithm>

#include "csrc/layout/check.h"
#include "csrc/schedule/simulator.h"

namespace mok::schedule {

void Simulator::fail(const Violation& violation, const RankState& rank, int32_t cta, Role role,
                     const std::string& task) {
    SimError error{violation.type,     rank.model->rank, cta, role_name(role), task, "",
                   violation.expected, violation.seen,   ""};
    error.message = concat("rank ", error.rank, cta < 0 ? std::string() : concat(" CTA ", cta), " ",
                           error.agent, ", ", task, ": ", violation.text, ".");
    fail(std::move(error));
}

void Simulator::fail(SimError error) {
    if (result_.errors.size() < kMaxErrors) result_.errors.push_back(std::move(error));
}

std::string Simulator::counter_text(const RankModel& model, int64_t counter, Counter& kind,
                                    int32_t& index) const {
    int32_t c = 0;
    while (counter >= model.layout.begin[c + 1]) ++c;
    kind = static_cast<Counter>(c);
    index = static_cast<int32_t>(counter - model.layout.begin[c]);
    const std::string name = counter_name(kind);
    if (kind == Counter::kSpanRead) return concat(name, " of span ", index);
    if (kind == Counter::kAccumulator) return concat(name, " of tile ", index);
    const int32_t shared = model.shape().num_shared_blocks;
    return index < shared ? concat(name, " of shared row block ", index)
                          : concat(name, " of row block ", index - shared);
}

void Simulator::report_deadlock() {
    for (const RankState& rank : ranks_) {
        if (rank.host == Host::kDone || rank.host == Host::kCombine) continue;
        // The earliest task that waits says most; then a pull.
        int32_t worst = kNone;
        for (int32_t cta = 0; cta < options_.num_ctas; ++cta) {
            const int32_t agent = agents_.agent(rank.model->rank, cta, Role::kProducer);
            if (status_[agent] != Agent::kWaiting) continue;
            if (worst == kNone || rank.ctas[cta].claimed < rank.ctas[agents_.cta(worst)].claimed)
                worst = agent;
        }
        std::vector<int32_t> shown;
        if (worst != kNone) shown.push_back(worst);
        for (int32_t cta = 0; cta < options_.num_ctas; ++cta) {
            const int32_t agent = agents_.agent(rank.model->rank, cta, Role::kPull);
            if (status_[agent] != Agent::kWaiting) continue;
            shown.push_back(agent);
            break;
        }
        for (const int32_t agent : shown) {
            const Cta& cta = rank.ctas[agents_.cta(agent)];
            const Waiting& waiting = waiting_[agent];
            Counter counter;
            int32_t index;
            const std::string what = counter_text(*rank.model, waiting.counter, counter, index);
            const bool is_pull = agents_.role(agent) == Role::kPull;
            const std::string task =
                is_pull ? concat("pull element ", cta.cursor) : describe(rank.model->tasks[cta.claimed]);
            SimError error{
                "deadlock", rank.model->rank,      agents_.cta(agent), role_name(agents_.role(agent)),
                task,       counter_name(counter), waiting.target,     rank.counters[waiting.counter],
                ""};
            error.message =
                concat("deadlock: rank ", error.rank, " CTA ", error.cta, " ", error.agent, ", ", task,
                       ", waits for ", what, ": expected ", error.expected, ", seen ", error.seen, ".");
            fail(std::move(error));
        }
        if (!shown.empty()) continue;
        SimError error{"deadlock",        rank.model->rank, -1, "host", "", "",
                       options_.num_ctas, rank.num_exited,  ""};
        error.message = concat("deadlock: rank ", error.rank, ": ", rank.num_exited, " of ",
                               options_.num_ctas, " CTAs have exited and nothing waits for a counter.");
        fail(std::move(error));
    }
}

void Simulator::combine(RankState& rank) {
    const RankModel& model = *rank.model;
    const auto check = [&](const std::vector<int32_t>& stored, int32_t expected_tiles, const char* what) {
        for (size_t slot = 0; slot < stored.size(); ++slot) {
            const bool route = ids_[model.rank][slot] >= 0;
            const int32_t expected = route ? expected_tiles : 0;
            if (stored[slot] == expected) continue;
            const char* type = stored[slot] < expected ? "read before written" : "written twice";
            fail(Violation{type, 0, expected, stored[slot],
                           concat("combines ", what, " of slot ", slot, ", of which ", stored[slot], " of ",
                                  expected, " tiles have come home")},
                 rank, -1, Role::kHost, "combine");
            return;
        }
    };
    check(rank.home, model.home_tiles, "the row");
    check(rank.home_router, model.sends_router_gradient ? 1 : 0, "the router gradient");
}

void Simulator::check_counters(const RankState& rank) {
    const RankModel& model = *rank.model;
    for (size_t i = 0; i < rank.counters.size(); ++i) {
        if (rank.counters[i] == model.finals[i]) continue;
        Counter counter;
        int32_t index;
        const std::string what = counter_text(model, static_cast<int64_t>(i), counter, index);
        SimError error{"final counter", model.rank,       -1, "", "", counter_name(counter),
                       model.finals[i], rank.counters[i], ""};
        error.message = concat("rank ", model.rank, ": ", what, " ends with ", rank.counters[i],
                               " instead of ", model.finals[i], ".");
        fail(std::move(error));
        return;
    }
}

void Simulator::finish() {
    result_.stats.duration = clock_.now();
    if (result_.errors.size() >= kMaxErrors) return;
    const bool all_done = std::all_of(ranks_.begin(), ranks_.end(),
                                      [](const RankState& rank) { return rank.host == Host::kDone; });
    if (!all_done) {
        report_deadlock();
        return;
    }
    for (const RankState& rank : ranks_) {
        const RankModel& model = *rank.model;
        for (size_t i = 0; i < rank.executed.size(); ++i) {
            if (rank.executed[i] != 0) continue;
            fail(Violation{"tile missing", 0, 1, 0, "no CTA has run it"}, rank, -1, Role::kHost,
                 describe(model.tasks[i]));
            break;
        }
        check_counters(rank);
        for (size_t i = 0; i < rank.gradients.size(); ++i) {
            if (rank.gradients[i] == model.gradient_parts[i]) continue;
            const int64_t expert = static_cast<int64_t>(i) / model.gradient_stride;
            const bool shared = expert == model.shape().sizes.num_local_experts;
            const bool idle = !shared && model.schedule->plan().counts[expert] == 0;
            fail(Violation{idle ? "idle gradient not zeroed" : "gradient not written once", 0,
                           model.gradient_parts[i], rank.gradients[i],
                           concat("tile ", static_cast<int64_t>(i) % model.gradient_stride, " of ",
                                  shared ? std::string("the shared expert") : concat("local expert ", expert),
                                  " has ", rank.gradients[i], " of ", model.gradient_parts[i], " parts")},
                 rank, -1, Role::kHost, "gradients");
            break;
        }
    }
}

}  // namespace mok::schedule
