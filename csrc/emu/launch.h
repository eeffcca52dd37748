// Runs kernels on the emulated machine: several ranks at once, each a stream of launches.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace mok::emu {

/// Global memory that kernels may touch. What lies in no region is out of bounds.
struct Region {
    std::string name;
    void* base = nullptr;  // 16-byte aligned
    size_t bytes = 0;
    int rank = 0;               // whose memory it is; kAnyRank: pinned host memory, everyone's
    bool peer_visible = false;  // in the symmetric heap: other ranks may touch it
    /// Written by the host just before the rank's first launch: poison until then, and nobody may read it who
    /// does not know that the launch has begun.
    bool is_input = false;
    /// Read by the host just after the rank's last launch: holds after the run what it held then, and all
    /// writes must be ordered before that end.
    bool is_output = false;
    /// Only read by kernels.
    bool is_constant = false;

    static constexpr int kAnyRank = -1;
};

/// Names for reports. Shared memory: element i of `stride` bytes is name[i].
struct SharedName {
    uint32_t offset, bytes, stride;
    std::string name;
};
struct WarpRole {
    uint32_t first_warp, warps;
    std::string name;
};

struct Launch {
    std::string name;
    int rank = 0;
    uint32_t blocks = 1;
    uint32_t threads = kDefaultThreads;  // a multiple of 32
    uint32_t cluster = 1;                // divides `blocks`
    uint32_t shared_bytes = 0;
    bool cooperative = false;  // otherwise the schedule may start blocks as late as when others have exited
    uint32_t registers = 0;    // per thread at launch, for setmaxnreg; 0: what fits 65536, at most 255
    std::vector<SharedName> shared_names;
    std::vector<WarpRole> roles;
    std::function<void()> body;  // once per thread

    static constexpr uint32_t kDefaultThreads = 128;
};

template <typename Params>
void set_kernel(Launch& launch, void (*kernel)(Params), const Params& params) {
    // Not captured by value: with -ftrivial-auto-var-init g++ 12 clears what it takes for padding of the
    // temporary, and errs where Params has a base class.
    launch.body = [kernel, copy = std::make_shared<const Params>(params)] { kernel(*copy); };
}

enum class Policy : uint8_t {
    kBySeed,           // the seed picks a mixture
    kRandom,           // anyone, any time
    kRunUntilBlocked,  // a warp keeps running while it can
    kStarvedWarps,     // some warps run rarely
    kHeldCopies,       // copies complete when nothing else can move
    kLateRank,         // one rank starts when the others can do nothing more
};

struct LeftOut {
    std::string wrapper, file;
    uint32_t line = 0;
};

/// The host ends a rank's waits while its kernels run: from a step on `word` is 1, and bounded waits of the
/// rank look at it at any time, whether or not something else can move. What a kernel that gives up still
/// reads and writes is used by nobody, so from then on `order` and `proxy` are not asked of that rank's
/// accesses; all else is.
struct EndedRank {
    int rank = -1;  // -1: none
    uint64_t step = 0;
    uint32_t* word = nullptr;  // in memory of the rank
};

struct RunOptions {
    uint64_t seed = 1;
    Policy policy = Policy::kBySeed;
    /// When nothing can move, time passes until a bounded wait expires, instead of ending in a deadlock.
    bool time_outs = false;
    bool keep_log = false;
    bool collect_sites = false;  // for mutation
    uint64_t max_steps = 400'000'000;
    LeftOut left_out;  // mutation; line 0: nothing
    EndedRank ended;
};

struct CallSite {
    std::string wrapper, file;
    uint32_t line;
    uint64_t calls;
};

struct RunStats {
    uint64_t threads = 0, steps = 0, switches = 0, copies = 0, wgmmas = 0, clock_components = 0;
    uint64_t virtual_ns = 0;
};

struct RunResult {
    bool ok = false;
    std::string error;                  // kind, thread, instruction, source line, what is wrong
    std::vector<std::string> warnings;  // doubtful, but the run went on
    std::vector<std::string> trapped;   // names of launches that ended in a trap
    std::vector<CallSite> sites;        // synchronising calls, in order of file and line
    std::vector<std::string> log;       // events, if kept
    RunStats stats;
};

/// Runs all launches; those of one rank one after the other. One run at a time in a process. Throws
/// std::invalid_argument for launches and regions that make no sense; errors of kernels are in the result.
RunResult run(const std::vector<Region>& regions, const std::vector<Launch>& launches,
              const RunOptions& options);

}  // namespace mok::emu
