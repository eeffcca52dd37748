// Which agent steps next: seeded adversaries over the agents that can move, or a clock.
#pragma once

#include <cstdint>
#include <queue>
#include <vector>

#include "csrc/schedule/sim_types.h"

namespace mok::schedule {

/// A small, fast generator with the same numbers everywhere (splitmix64).
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = state_ += 0x9e3779b97f4a7c15ull;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
        return z ^ (z >> 31);
    }
    int64_t below(int64_t bound) { return static_cast<int64_t>(next() % static_cast<uint64_t>(bound)); }

  private:
    uint64_t state_;
};

/// Roles of a CTA's agents; kHost is the rank's own: launch, barriers, combine.
enum class Role : int32_t {
    kArrive = 0,
    kProducer,
    kConsumer,
    kStore0,
    kStore1,
    kPull,
    kPullDone,
    kHost,
};
constexpr int32_t kCtaRoles = 7;

/// Agents are numbered (rank * num_ctas + cta) * kCtaRoles + role, the hosts behind them.
struct AgentIds {
    int32_t num_ranks, num_ctas;

    int32_t agent(int32_t rank, int32_t cta, Role role) const {
        return (rank * num_ctas + cta) * kCtaRoles + static_cast<int32_t>(role);
    }
    int32_t host(int32_t rank) const { return num_ranks * num_ctas * kCtaRoles + rank; }
    int32_t num_agents() const { return num_ranks * (num_ctas * kCtaRoles + 1); }
    bool is_host(int32_t agent) const { return agent >= num_ranks * num_ctas * kCtaRoles; }
    int32_t rank(int32_t agent) const {
        return is_host(agent) ? agent - num_ranks * num_ctas * kCtaRoles : agent / (num_ctas * kCtaRoles);
    }
    int32_t cta(int32_t agent) const { return is_host(agent) ? -1 : agent / kCtaRoles % num_ctas; }
    Role role(int32_t agent) const {
        return is_host(agent) ? Role::kHost : static_cast<Role>(agent % kCtaRoles);
    }
};

const char* role_name(Role role);

/// Picks among the agents that can move. Agents in disfavour move only when no other can.
class Adversary {
  public:
    void reset(const AgentIds& ids, const SimOptions& options);
    void enable(int32_t agent);
    /// The next agent to step, -1 when none can.
    int32_t pick();

  private:
    struct Pool {
        std::vector<int32_t> agents;
        size_t head = 0;  // of kOldest, which takes from the front
        bool empty() const { return head == agents.size(); }
    };
    bool disfavoured(int32_t agent) const;
    void choose_victim();
    int32_t take(Pool& pool);

    AgentIds ids_{};
    SimOptions options_;
    Policy policy_ = Policy::kRandom;
    Random random_{0};
    int32_t victim_ = 0;
    int64_t victim_until_ = 0;  // enablings left until another is chosen
    Pool favoured_, others_;
};

/// Agents by the time at which their step is done.
class Clock {
  public:
    void enable(int32_t agent, double delay) { queue_.push(Entry{now_ + delay, next_++, agent}); }
    int32_t pick() {
        if (queue_.empty()) return -1;
        const Entry entry = queue_.top();
        queue_.pop();
        now_ = entry.time;
        return entry.agent;
    }
    double now() const { return now_; }

  private:
    struct Entry {
        double time;
        int64_t order;
        int32_t agent;
        bool operator<(const Entry& other) const {
            return time != other.time ? time > other.time : order > other.order;
        }
    };
    std::priority_queue<Entry> queue_;
    double now_ = 0;
    int64_t next_ = 0;
};

}  // namespace mok::schedule
