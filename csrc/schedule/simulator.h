// The simulator: all ranks' CTAs run a schedule step by step under an adversary or a clock, and every rule of
// the schedule is checked on the way.
//
// A CTA has a producer (claims tasks, waits for their counters, loads), a consumer (main loop, in order), two
// store streams (issue, then complete and signal) and a pull warp (claims elements, waits for their ring
// slots, stores; completion and signals are a step of their own). A rank's host publishes inputs, meets its
// peers at the start barrier, starts the kernel, meets them at the end barrier and checks what came home.
// Inside a kernel nothing waits for another rank.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "csrc/schedule/sim_memory.h"
#include "csrc/schedule/sim_scheduler.h"

namespace mok::schedule {

class Simulator {
  public:
    /// Builds plans, schedules and expectations of all ranks; `bug` may change how they are built.
    Simulator(const SimProblem& problem, const Bug& bug);

    /// One interleaving, chosen by options.policy and options.seed; options.bug must be what the simulator
    /// was built with.
    SimResult run(const SimOptions& options);
    /// One run in which each step takes its cost.
    SimResult run_timed(const SimOptions& options, const SimCosts& costs);

  private:
    static constexpr int32_t kNone = -1;
    static constexpr int32_t kDepth = 2;         // tasks a CTA has loads in flight for
    static constexpr int32_t kPendingPulls = 4;  // stored batches of a pull warp that are not complete
    static constexpr size_t kMaxErrors = 16;

    enum class Agent : int8_t { kIdle, kEnabled, kWaiting };

    struct Waiting {
        int64_t counter = 0;
        int32_t target = 0;
        int32_t next = kNone;
    };

    struct Stream {
        int32_t staged = kNone, issued = kNone;  // task index
    };

    struct Range {
        int64_t begin = 0, end = 0;
    };

    struct Cta {
        bool arrived = false, exited = false, no_more_tasks = false, no_more_pulls = false;
        int32_t claimed = kNone;
        int32_t waited_for = kNone;  // counter that the claimed task waited for last
        std::array<int32_t, kDepth> started{};
        std::array<int32_t, kDepth> started_waited_for{};
        int32_t num_started = 0;
        Stream streams[2];
        Range batch;         // claimed pull elements
        int64_t cursor = 0;  // next element to store
        bool loaded = false;
        std::array<Range, kPendingPulls> pending{};
        int32_t num_pending = 0;
        int64_t static_next = 0;
        double consumer_began = 0, consumer_ended = 0;
    };

    enum class Host : int8_t { kPublish, kStart, kRunning, kEnd, kCombine, kDone };

    struct RankState {
        const RankModel* model = nullptr;
        RankMemory memory;
        std::vector<int32_t> counters;
        std::vector<int32_t> first_waiter;  // per counter
        std::vector<uint8_t> executed;
        std::vector<int32_t> home, home_router;        // per slot of this rank
        std::vector<int32_t> gradients, accumulators;  // stored parts
        std::vector<Cta> ctas;
        int64_t next_claim = 0, next_pull = 0;
        int32_t num_exited = 0;
        Host host = Host::kPublish;
        bool published = false;
        double link_free = 0;
    };

    SimResult execute(const SimOptions& options, const SimCosts* costs);
    void reset(const SimOptions& options);
    void step(int32_t agent);
    void finish();

    void wake(int32_t agent);
    double delay(int32_t agent);
    double pull_delay(RankState& rank, const Cta& cta);
    void wait_on(int32_t agent, int64_t counter, int32_t target);
    void signal(RankState& rank, Counter counter, int32_t index, int32_t count);
    /// Registers the agent and returns false when one of the waits is not met.
    bool await(int32_t agent, RankState& rank, const Wait* waits, int32_t num_waits);

    void step_host(RankState& rank);
    void start_kernel(RankState& rank);
    void combine(RankState& rank);
    void step_arrival(RankState& rank, int32_t cta);
    void step_producer(RankState& rank, int32_t cta);
    void start_task(RankState& rank, int32_t cta);
    void step_consumer(RankState& rank, int32_t cta);
    void step_store(RankState& rank, int32_t cta, int32_t stream);
    void issue_store(RankState& rank, int32_t cta, int32_t task_idx, int32_t parts);
    void complete_store(RankState& rank, int32_t cta, int32_t task_idx, int32_t stream, int32_t parts);
    void store_home(RankState& rank, int32_t cta, const Task& task, int32_t stream);
    void step_pull(RankState& rank, int32_t cta);
    bool claim_pulls(RankState& rank, Cta& cta);
    bool await_slots(int32_t agent, RankState& rank, int64_t element);
    void issue_pull(RankState& rank, int32_t cta, int64_t element);
    void step_pull_done(RankState& rank, int32_t cta);
    void signal_pulls(RankState& rank, const Range& range);
    void maybe_exit(RankState& rank, int32_t cta);

    int32_t stream_parts(const RankModel& model, int32_t task_idx, int32_t stream) const;
    bool can_consume(const RankState& rank, const Cta& cta) const;
    int64_t pull_index(const RankState& rank, int64_t element) const;
    bool signals_early(Counter counter) const { return options_.bug.is(BugKind::kEarlySignal, counter); }
    void signal_stored(RankState& rank, const Task& task, int32_t stream, int32_t parts);

    void fail(const Violation& violation, const RankState& rank, int32_t cta, Role role,
              const std::string& task);
    void fail(SimError error);
    void report_deadlock();
    void check_counters(const RankState& rank);
    std::string counter_text(const RankModel& model, int64_t counter, Counter& kind, int32_t& index) const;

    std::vector<RankModel> models_;
    int32_t num_experts_;
    int32_t top_k_;
    std::vector<std::vector<int32_t>> ids_;

    SimOptions options_;
    const SimCosts* costs_ = nullptr;
    AgentIds agents_{};
    Adversary adversary_;
    Clock clock_;
    std::vector<Agent> status_;
    std::vector<Waiting> waiting_;
    std::vector<RankState> ranks_;
    int32_t num_published_ = 0, num_ended_ = 0;
    SimResult result_;
};

}  // namespace mok::schedule
