#include "csrc/schedule/sim_scheduler.h"

#include <utility>

namespace mok::schedule {

const char* role_name(Role role) {
    switch (role) {
        case Role::kArrive:
            return "arrival";
        case Role::kProducer:
            return "producer";
        case Role::kConsumer:
            return "consumer";
        case Role::kStore0:
            return "store 0";
        case Role::kStore1:
            return "store 1";
        case Role::kPull:
            return "pull";
        case Role::kPullDone:
            return "pull completion";
        case Role::kHost:
            return "host";
    }
    return "";
}

void Adversary::reset(const AgentIds& ids, const SimOptions& options) {
    ids_ = ids;
    options_ = options;
    random_ = Random(options.seed * 0x2545f4914f6cdd1dull + 1);
    policy_ = options.policy;
    if (policy_ == Policy::kMixed) {
        policy_ = static_cast<Policy>(random_.below(static_cast<int64_t>(Policy::kMixed)));
    }
    choose_victim();
    favoured_ = Pool{std::move(favoured_.agents)};
    others_ = Pool{std::move(others_.agents)};
    favoured_.agents.clear();
    others_.agents.clear();
}

void Adversary::choose_victim() {
    // Stretches of all lengths: a CTA that stops in the middle of its work holds more than one that never
    // began.
    victim_until_ = int64_t{1} << (4 + random_.below(9));
    victim_ = static_cast<int32_t>(random_.below(policy_ == Policy::kStarveRole ? kCtaRoles : ids_.num_ctas));
}

bool Adversary::disfavoured(int32_t agent) const {
    if (options_.stalled_rank >= 0 && ids_.rank(agent) == options_.stalled_rank) return true;
    const Role role = ids_.role(agent);
    switch (policy_) {
        case Policy::kStarveCta:
            return ids_.cta(agent) == victim_;
        case Policy::kStarveRole:
            return static_cast<int32_t>(role) == victim_;
        case Policy::kHoldStores:
            return role == Role::kStore0 || role == Role::kStore1 || role == Role::kPullDone;
        default:
            return false;
    }
}

void Adversary::enable(int32_t agent) {
    if (--victim_until_ <= 0) choose_victim();
    (disfavoured(agent) ? others_ : favoured_).agents.push_back(agent);
}

int32_t Adversary::take(Pool& pool) {
    std::vector<int32_t>& agents = pool.agents;
    if (policy_ == Policy::kOldest) {
        const int32_t agent = agents[pool.head++];
        if (pool.empty() || pool.head > 4096) {
            agents.erase(agents.begin(), agents.begin() + static_cast<int64_t>(pool.head));
            pool.head = 0;
        }
        return agent;
    }
    const bool latest = policy_ == Policy::kLatest || (policy_ == Policy::kBurst && random_.below(8) != 0);
    if (!latest) std::swap(agents[random_.below(static_cast<int64_t>(agents.size()))], agents.back());
    const int32_t agent = agents.back();
    agents.pop_back();
    return agent;
}

int32_t Adversary::pick() {
    if (!favoured_.empty()) return take(favoured_);
    if (!others_.empty()) return take(others_);
    return -1;
}

}  // namespace mok::schedule
