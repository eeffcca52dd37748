#include "csrc/schedule/sim_types.h"

#include <iterator>

#include "csrc/layout/check.h"

namespace mok::schedule {

namespace {

constexpr const char* kCounterNames[kNumCounters] = {"x",       "dout",    "gate_up",   "hidden_read",
                                                     "dhidden", "dx_read", "span_read", "accumulator"};

constexpr const char* kTaskNames[kNumTaskKinds] = {
    "gate_up",    "down",      "dhidden", "dx",        "router_grad", "wgrad_gate", "wgrad_up",
    "wgrad_down", "bias_gate", "bias_up", "bias_down", "zero_grad",   "exit"};

constexpr const char* kPolicyNames[] = {"random",     "latest",      "oldest",      "burst",
                                        "starve_cta", "starve_role", "hold_stores", "mixed"};

struct BugName {
    const char* name;
    BugKind kind;
    bool has_counter;
};

constexpr BugName kBugNames[] = {
    {"none", BugKind::kNone, false},
    {"drop_wait", BugKind::kDropWait, true},
    {"shift_wait", BugKind::kShiftWait, true},
    {"early_signal", BugKind::kEarlySignal, true},
    {"never_signal", BugKind::kNeverSignal, true},
    {"signal_once_per_tile", BugKind::kSignalOncePerTile, false},
    {"first_block_only", BugKind::kFirstBlockOnly, false},
    {"swap_order", BugKind::kSwapOrder, false},
    {"ignore_reuse", BugKind::kIgnoreReuse, false},
    {"reuse_by_piece", BugKind::kReuseByPiece, false},
    {"ring_short", BugKind::kRingShort, false},
    {"dedup_across_chunks", BugKind::kDedupAcrossChunks, false},
    {"reverse_pulls", BugKind::kReversePulls, false},
    {"hold_signals", BugKind::kHoldSignals, false},
    {"static_pulls", BugKind::kStaticPulls, false},
    {"claim_twice", BugKind::kClaimTwice, false},
    {"lose_task", BugKind::kLoseTask, false},
    {"skip_zero", BugKind::kSkipZero, false},
    {"skip_start_barrier", BugKind::kSkipStartBarrier, false},
    {"skip_end_barrier", BugKind::kSkipEndBarrier, false},
};

template <typename Names>
std::string list_of(const Names& names) {
    std::string text;
    for (const auto& name : names) text += (text.empty() ? "" : ", ") + std::string(name);
    return text;
}

template <typename Names>
int32_t find_name(const char* argument, const Names& names, const std::string& name) {
    for (size_t i = 0; i < std::size(names); ++i) {
        if (names[i] == name) return static_cast<int32_t>(i);
    }
    MOK_CHECK(false, argument, " = '", name, "': must be one of ", list_of(names), ".");
    return -1;
}

}  // namespace

const char* counter_name(Counter counter) {
    return kCounterNames[static_cast<int32_t>(counter)];
}

const char* task_kind_name(TaskKind kind) {
    return kTaskNames[static_cast<int32_t>(kind)];
}

Counter parse_counter(const std::string& name) {
    return static_cast<Counter>(find_name("counter", kCounterNames, name));
}

Policy parse_policy(const std::string& name) {
    return static_cast<Policy>(find_name("policy", kPolicyNames, name));
}

Bug parse_bug(const std::string& text) {
    const size_t colon = text.find(':');
    std::vector<const char*> names;
    for (const BugName& bug : kBugNames) names.push_back(bug.name);
    const BugName& found = kBugNames[find_name("bug", names, text.substr(0, colon))];
    MOK_CHECK(found.has_counter == (colon != std::string::npos), "bug = '", text, "': ", found.name,
              found.has_counter ? " needs a counter, as in 'drop_wait:x'." : " takes no counter.");
    return Bug{found.kind, found.has_counter ? parse_counter(text.substr(colon + 1)) : Counter::kX};
}

std::vector<std::string> all_bugs() {
    std::vector<std::string> texts;
    for (const BugName& bug : kBugNames) {
        if (bug.kind == BugKind::kNone) continue;
        if (!bug.has_counter) texts.push_back(bug.name);
        for (int32_t c = 0; bug.has_counter && c < kNumCounters; ++c) {
            texts.push_back(concat(bug.name, ":", kCounterNames[c]));
        }
    }
    return texts;
}

std::string describe(const Task& task) {
    std::string text = task.shared ? "shared " : "";
    text += task_kind_name(task.kind);
    if (task.is_gradient() || task.kind == TaskKind::kZeroGrad) {
        if (!task.shared) text += concat(" expert ", task.expert);
        if (task.end > task.begin) text += concat(" row blocks ", task.begin, "..", task.end - 1);
        return text + concat(" tile (", task.m_tile, ", ", task.n_tile, ")");
    }
    return text + concat(" row block ", task.begin, " column ", task.n_tile);
}

}  // namespace mok::schedule
