#include "csrc/comm/peer_comm.h"

#include <sched.h>

#include <chrono>
#include <cstdlib>
#include <iomanip>
#include <stdexcept>

#include "csrc/comm/interrupt.h"
#include "csrc/comm/shared_memory.h"
#include "csrc/layout/check.h"

namespace mok {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kDefaultTimeout = 600.0;
// A wait is counted in slices, so that a process that was stopped (SIGSTOP, a suspended job) loses one slice
// of its time and not all of it: after `fg` no rank gives up on peers that were stopped as well.
constexpr double kSlice = 1.0;
// About what a sleep and a wake-up cost; spinning longer only takes cores from the ranks that still work.
constexpr double kSpin = 20e-6;

double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

int usable_cores() {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

std::string format_seconds(double seconds) {
    std::ostringstream stream;
    stream << std::fixed << std::setprecision(seconds < 10 ? 2 : 0) << seconds << " s";
    return stream.str();
}

std::vector<int> listed(const PeerComm::Ranks& ranks) {
    std::vector<int> list;
    for (int r = 0; r < kMaxGroupRanks; ++r) {
        if (ranks[r]) list.push_back(r);
    }
    return list;
}

const char* name_barrier(uint64_t barrier) {
    return barrier == 1 ? "first" : "second";
}

}  // namespace

std::string name_ranks(const std::vector<int>& ranks) {
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (size_t i = 0; i < ranks.size(); ++i) {
        if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
        text += std::to_string(ranks[i]);
    }
    return text;
}

PeerComm::PeerComm(char* my_window, int64_t stride, int rank, int num_ranks)
    : my_window_(my_window),
      stride_(stride),
      rank_(rank),
      num_ranks_(num_ranks),
      timeout_(default_timeout()) {
    MOK_CHECK(num_ranks >= 1 && num_ranks <= kMaxGroupRanks, "num_ranks is ", num_ranks,
              ", but a group has 1 to ", kMaxGroupRanks, " ranks.");
    MOK_CHECK(rank >= 0 && rank < num_ranks, "rank is ", rank, ", but must be in [0, ", num_ranks, ").");
    MOK_CHECK(num_ranks == 1 || stride >= control_bytes(num_ranks), "stride is ", stride,
              " bytes, but the control block alone takes ", control_bytes(num_ranks), ".");
    spin_seconds_ = num_ranks <= usable_cores() ? kSpin : 0.0;
}

double PeerComm::default_timeout() {
    const char* text = std::getenv("MOK_TIMEOUT_S");
    if (text == nullptr || *text == '\0') return kDefaultTimeout;
    char* end = nullptr;
    const double seconds = std::strtod(text, &end);
    MOK_CHECK(*end == '\0' && seconds > 0 && seconds < 1e9, "MOK_TIMEOUT_S is '", text,
              "', but it must be a positive number of seconds; correct or unset it.");
    return seconds;
}

void PeerComm::set_timeout(double seconds) {
    MOK_CHECK(seconds > 0 && seconds < 1e9, "timeout is ", seconds,
              " seconds, but it must be positive and below 1e9.");
    timeout_ = seconds;
}

uint64_t PeerComm::begin_call() {
    if (closed_) throw WorkspaceClosed("begin_call was used after close; create a new workspace.");
    check();
    if (in_call_ && barriers_passed_ > 0) {
        abort_fatal("left the call between its barriers");
        rethrow();
    }
    abort_call("left the call before its first barrier");
    call_ = next_call_++;
    barriers_passed_ = 0;
    in_call_ = true;
    return call_;
}

PeerComm::Ranks PeerComm::missing(int rank, uint64_t epoch) const {
    Ranks ranks;
    for (int peer = 0; peer < num_ranks_; ++peer) {
        if (peer == rank) continue;
        const uint64_t seen = shared::load_acquire(control_slot(window(rank), peer)->epoch);
        if (static_cast<int64_t>(seen - epoch) < 0) ranks.set(peer);
    }
    return ranks;
}

PeerComm::Ranks PeerComm::find_blamed(uint64_t epoch) const {
    Ranks blamed, visited;
    visited.set(rank_);
    std::vector<int> open = listed(missing(rank_, epoch));
    while (!open.empty()) {
        const int peer = open.back();
        open.pop_back();
        if (visited[peer]) continue;
        visited.set(peer);
        const uint64_t its_epoch = shared::load_acquire(control_head(window(peer))->waiting);
        const Ranks holding_it_up = its_epoch == 0 ? Ranks() : missing(peer, its_epoch);
        if (holding_it_up.none()) blamed.set(peer);
        for (int next : listed(holding_it_up)) open.push_back(next);
    }
    return blamed.any() ? blamed : missing(rank_, epoch);
}

void PeerComm::throw_if_call_aborted() {
    int mover = -1;
    for (int peer = 0; peer < num_ranks_; ++peer) {
        if (peer == rank_) continue;
        const AbortRecord& record = own_slot(peer).aborts[call_ % kAbortRing];
        const uint64_t complete = 2 * call_ + 2;
        uint64_t sequence = shared::load_acquire(record.sequence);
        if (sequence == complete) {
            const std::string reason = shared::read_text(record.reason);
            __atomic_thread_fence(__ATOMIC_ACQUIRE);
            sequence = shared::load_relaxed(record.sequence);
            if (sequence == complete) {
                in_call_ = false;
                throw PeerAborted(concat("call ", call_, " was aborted by rank ", peer, ": ", reason));
            }
        }
        if (static_cast<int64_t>(sequence - complete) > 0) mover = peer;
    }
    if (mover >= 0) {
        in_call_ = false;
        throw PeerAborted(concat("call ", call_, " was aborted by rank ", mover,
                                 ", which has since aborted later calls too (its reason was overwritten)."));
    }
}

void PeerComm::throw_if_fatal(uint64_t first_ignored_call) {
    for (int peer = 0; peer < num_ranks_; ++peer) {
        if (peer == rank_) continue;
        const FatalRecord& record = own_slot(peer).fatal;
        const auto kind = static_cast<FatalKind>(shared::load_acquire(record.kind));
        if (kind == FatalKind::kNone || record.call >= first_ignored_call) continue;
        if (kind == FatalKind::kAbort) {
            fail(false,
                 concat("call ", record.call, " was aborted by rank ", peer, ": ",
                        shared::read_text(record.reason), " (in mid-call: the workspace is unusable)"));
        }
        Ranks blamed;
        for (int r = 0; r < num_ranks_; ++r) blamed[r] = (record.blamed[r / 64] >> (r % 64)) & 1;
        const std::string where =
            concat(" in the ", name_barrier(record.barrier), " barrier of call ", record.call);
        const std::string waited = format_seconds(static_cast<double>(record.milliseconds) / 1000.0);
        if (blamed[rank_]) {
            fail(false,
                 concat("rank ", peer, " waited ", waited, " for this rank (", rank_, ")", where,
                        " and gave up; this rank was too slow or stopped (MOK_TIMEOUT_S sets the time)."));
        }
        fail(true, concat("rank ", rank_, " was told by rank ", peer, " that ", name_ranks(listed(blamed)),
                          " did not arrive", where, " within ", waited, "."));
    }
}

template <typename Done>
bool PeerComm::wait(double seconds, Done done) {
    const Clock::time_point spin_start = Clock::now();
    do {
        if (done()) return true;
        for (int i = 0; i < 16; ++i) pause_core();
    } while (seconds_since(spin_start) < spin_seconds_);

    ControlHead& head = *control_head(my_window_);
    struct Sleeping {
        ControlHead& head;
        ~Sleeping() { shared::store_ordered(head.sleeping, 0u); }
    } sleeping{head};
    double waited = 0.0;
    while (true) {
        shared::store_ordered(head.sleeping, 1u);
        const uint32_t seen = shared::load_ordered(head.doorbell);
        if (done()) return true;
        if (waited >= seconds) return false;
        const Clock::time_point start = Clock::now();
        shared::futex_wait(head.doorbell, seen, std::min(kSlice, seconds - waited));
        waited += std::min(seconds_since(start), kSlice);
        const bool undisturbed = shared::load_relaxed(head.doorbell) == seen;
        if (undisturbed && interrupted()) {
            if (closed_) return false;
            abort_fatal("interrupted by a signal");
            rethrow();
        }
    }
}

void PeerComm::barrier() {
    if (!error_.empty()) rethrow();
    if (closed_) throw WorkspaceClosed("barrier was used after close; create a new workspace.");
    if (!in_call_ || barriers_passed_ >= 2) {
        throw std::logic_error("barrier was used outside a call; a call is begin_call and two barriers.");
    }
    const uint64_t epoch = 2 * call_ + 1 + barriers_passed_;
    for (int peer = 0; peer < num_ranks_; ++peer) {
        if (peer == rank_) continue;
        shared::store_release(my_slot_at(peer).epoch, epoch);
        shared::ring(*control_head(window(peer)));
    }
    ControlHead& head = *control_head(my_window_);
    // Cleared however the wait ends: a rank that left no longer counts as held up by others.
    struct Waiting {
        ControlHead& head;
        Waiting(ControlHead& waiting_head, uint64_t epoch) : head(waiting_head) {
            shared::store_release(head.waiting, epoch);
        }
        ~Waiting() { shared::store_release<uint64_t>(head.waiting, 0); }
    } waiting(head, epoch);
    const bool arrived = wait(timeout_, [&] {
        const bool complete = missing(rank_, epoch).none();
        if (barriers_passed_ == 0) throw_if_call_aborted();
        throw_if_fatal(complete ? call_ + 1 : UINT64_MAX);
        if (complete) return true;
        for (int peer = 0; peer < num_ranks_; ++peer) {
            if (peer != rank_ && shared::load_acquire(own_slot(peer).closed) != 0 &&
                static_cast<int64_t>(shared::load_acquire(own_slot(peer).epoch) - epoch) < 0) {
                fail(false, concat("rank ", peer, " closed the workspace while rank ", rank_, " was in the ",
                                   position(), "; all ranks must make the same calls before close."));
            }
        }
        return false;
    });
    if (!arrived) expire(epoch);
    if (++barriers_passed_ == 2) in_call_ = false;
}

std::string PeerComm::position() const {
    return concat(name_barrier(barriers_passed_ + 1), " barrier of call ", call_);
}

void PeerComm::expire(uint64_t epoch) {
    const Ranks blamed = find_blamed(epoch);
    write_fatal(FatalKind::kTimeout, blamed, "");
    std::string seen;
    for (int peer : listed(blamed)) {
        seen +=
            concat(seen.empty() ? "" : ", ", shared::load_acquire(own_slot(peer).epoch), " from rank ", peer);
    }
    fail(true, concat("rank ", rank_, " waited ", format_seconds(timeout_), " in the ", position(), " for ",
                      name_ranks(listed(blamed)), " (expected epoch ", epoch, ", saw ", seen,
                      "); the process died, hangs or needs longer (MOK_TIMEOUT_S sets the time)."));
}

void PeerComm::write_fatal(FatalKind kind, const Ranks& blamed, const std::string& reason) {
    for (int peer = 0; peer < num_ranks_; ++peer) {
        if (peer == rank_) continue;
        FatalRecord& record = my_slot_at(peer).fatal;
        record.call = in_call_ ? call_ : next_call_;
        record.barrier = static_cast<uint64_t>(barriers_passed_ + 1);
        record.milliseconds = static_cast<uint64_t>(timeout_ * 1000.0);
        for (uint64_t& word : record.blamed) word = 0;
        for (int r : listed(blamed)) record.blamed[r / 64] |= uint64_t{1} << (r % 64);
        shared::write_text(record.reason, reason);
        shared::store_release(record.kind, static_cast<uint64_t>(kind));
        shared::ring(*control_head(window(peer)));
    }
}

void PeerComm::abort_call(const std::string& reason) {
    if (!in_call_ || broken() || closed_) return;
    if (barriers_passed_ > 0) return abort_fatal(reason);
    in_call_ = false;
    for (int peer = 0; peer < num_ranks_; ++peer) {
        if (peer == rank_) continue;
        AbortRecord& record = my_slot_at(peer).aborts[call_ % kAbortRing];
        shared::store_relaxed(record.sequence, 2 * call_ + 1);
        __atomic_thread_fence(__ATOMIC_RELEASE);
        shared::write_text(record.reason, reason);
        shared::store_release(record.sequence, 2 * call_ + 2);
        shared::ring(*control_head(window(peer)));
    }
}

void PeerComm::abort_fatal(const std::string& reason) {
    if (broken() || closed_) return;
    write_fatal(FatalKind::kAbort, Ranks(), reason);
    error_ = concat("rank ", rank_, " itself ended call ", call_, ": ", reason,
                    " (in mid-call: the workspace is unusable)");
    in_call_ = false;
}

void PeerComm::check() {
    if (broken()) rethrow();
    throw_if_fatal(UINT64_MAX);
}

void PeerComm::fail(bool is_timeout, const std::string& text) {
    error_ = text;
    error_is_timeout_ = is_timeout;
    in_call_ = false;
    rethrow();
}

void PeerComm::rethrow() const {
    if (error_is_timeout_) throw PeerTimeout(error_);
    throw PeerAborted(error_);
}

std::vector<int> PeerComm::close(double seconds) {
    if (closed_) return {};
    abort_call("closed the workspace");
    closed_ = true;
    for (int peer = 0; peer < num_ranks_; ++peer) {
        if (peer == rank_) continue;
        shared::store_release<uint64_t>(my_slot_at(peer).closed, 1);
        shared::ring(*control_head(window(peer)));
    }
    if (seconds <= 0 || broken()) return {};
    Ranks open;
    bool peer_failed = false;
    wait(seconds, [&] {
        open.reset();
        for (int peer = 0; peer < num_ranks_; ++peer) {
            if (peer == rank_) continue;
            open[peer] = shared::load_acquire(own_slot(peer).closed) == 0;
            peer_failed |= shared::load_acquire(own_slot(peer).fatal.kind) != 0;
        }
        return open.none() || peer_failed;
    });
    return peer_failed ? std::vector<int>() : listed(open);
}

}  // namespace mok
