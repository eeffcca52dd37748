// What the simulator is asked and what it answers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "csrc/schedule/counters.h"

namespace mok::schedule {

/// The problem: everyone's routes and one call's sizes.
struct SimProblem {
    std::vector<std::vector<int32_t>> ids;  // per rank [T * K], -1 or in [0, E)
    int32_t num_experts = 0;
    int32_t top_k = 1;
    int64_t pad = kDefaultPad;
    ScheduleSizes sizes{};  // num_tokens, num_local_experts: filled per rank
    KernelConfig config{};
};

/// Which step comes next when several are possible.
enum class Policy : int32_t {
    kRandom,      // any
    kLatest,      // the one that became possible last
    kOldest,      // the one that has been possible for longest
    kBurst,       // one agent for a while, then any
    kStarveCta,   // one CTA only when nothing else can move; another after a while
    kStarveRole,  // one role of all CTAs only when nothing else can move; another after a while
    kHoldStores,  // stores complete only when nothing else can move
    kMixed,       // one of the above, by seed
};

/// Mistakes that can be planted. Those about one counter name it.
enum class BugKind : int32_t {
    kNone,
    kDropWait,           // tasks and pulls do not wait for a counter
    kShiftWait,          // they wait for one less
    kEarlySignal,        // it is signalled when the store is issued
    kNeverSignal,        // one chunk's signals of it are forgotten
    kSignalOncePerTile,  // once instead of once per stored part
    kFirstBlockOnly,     // gradient tasks wait for the first row block of their span
    kSwapOrder,          // a later phase comes before the first
    kIgnoreReuse,        // the order does not know that ring slots are reused
    kReuseByPiece,       // backward's order looks at a piece's slots, not at its chunk's
    kRingShort,          // the buffers are one row block shorter than the ring
    kDedupAcrossChunks,
    kReversePulls,  // the pull list runs backwards
    kHoldSignals,   // a pull warp blocks while it holds stored rows that it has not signalled
    kStaticPulls,   // pulls are dealt out to CTAs in advance
    kClaimTwice,    // one task is handed out twice
    kLoseTask,      // one task is handed out to nobody
    kSkipZero,      // idle experts' gradients are not zeroed
    kSkipStartBarrier,
    kSkipEndBarrier,
};

struct Bug {
    BugKind kind = BugKind::kNone;
    Counter counter = Counter::kX;

    bool is(BugKind other) const { return kind == other; }
    bool is(BugKind other, Counter about) const { return kind == other && counter == about; }
};

struct SimOptions {
    uint64_t seed = 0;
    Policy policy = Policy::kMixed;
    Bug bug;
    int32_t num_ctas = 4;
    int32_t resident_ctas = -1;    // there from the start; -1: all
    bool late_after_exit = false;  // the others come only when one exits; else at any time
    int32_t stalled_rank = -1;     // moves only when no other rank can
    int32_t pull_batch = 1;        // elements a pull warp claims at a time
    bool timeline = false;
};

/// Microseconds of the timed run.
struct SimCosts {
    double tile[kNumTaskKinds] = {};  // per task; gradients: per row block of their span
    double claim = 0.5;
    double store = 1.0;   // from issue to completion
    double pull = 0.9;    // per element and pull warp
    double link = 0.0;    // per element from another rank, all warps of a rank together
    double launch = 0.0;  // rank r's kernel starts r times this later than the start barrier
};

struct SimError {
    std::string type;
    int32_t rank = -1;
    int32_t cta = -1;
    std::string agent;
    std::string task;
    std::string counter;
    int64_t expected = 0;
    int64_t seen = 0;
    std::string message;
};

struct TimelineEntry {
    int32_t rank, cta;
    TaskKind kind;
    bool shared;
    int32_t block, tile;
    double start, end;   // of the task's main loop and epilogue
    double wait;         // that the CTA's tensor cores stood still before it
    int32_t waited_for;  // counter its operands were waited for last, -1: none
};

struct SimStats {
    int64_t steps = 0;
    int64_t tasks = 0;
    int64_t pulls = 0;
    int64_t units = 0;  // distinct (source rank, token) of a chunk
    int64_t chunks = 0;
    int64_t waits = 0;    // times an agent had to wait for a counter
    double duration = 0;  // microseconds, timed runs
    double busy = 0;      // summed over CTAs
};

struct SimResult {
    std::vector<SimError> errors;
    SimStats stats;
    std::vector<TimelineEntry> timeline;
};

/// Names as the Python side spells them.
const char* counter_name(Counter counter);
const char* task_kind_name(TaskKind kind);
Counter parse_counter(const std::string& name);
Policy parse_policy(const std::string& name);
/// "kind" or "kind:counter".
Bug parse_bug(const std::string& text);
/// Every text that parse_bug takes, in order.
std::vector<std::string> all_bugs();
std::string describe(const Task& task);

}  // namespace mok::schedule
