// Calls and barriers between the ranks of one group on the CPU, over the control blocks of their windows.
//
// Every rank makes the same calls c = 0, 1, ... in the same order. A call has two barriers, of epochs 2c+1
// and 2c+2, or ends before its first one by `abort_call`. Rank s arrives at an epoch by storing it in slot s
// of every peer's block; rank r passes when all slots of its own block reached the epoch. Epochs only grow;
// differences are signed.
//
// Recoverable aborts. A rank s that leaves call c before its first barrier never stores 2c+1: it writes abort
// record c to all peers and goes on to call c+1, where it may arrive (2c+3) or abort again, any number of
// times, before a slow rank r looks. r must fail call c, whatever it sees by then:
//  - s writes record c to r before anything of a later call, and r reads the records after the epochs. So if
//  r sees an
//    epoch of s that is at least 2c+1, and s aborted c, r also sees record c or what replaced it.
//  - Place c % kAbortRing is only replaced by s aborting a call c' > c (c' = c + 4, ...), and its sequence
//  grows. So
//    "the sequence is at least 2c+2" holds for ever once s aborted c. It holds wrongly only if s reached such
//    a c' without aborting c, and for that s must have passed or left c: passing both barriers needs r's
//    2c+2, which r has not stored; leaving c because of a third rank's abort means that c is aborted anyway.
//    So for r in the first barrier of c the test is exact, and all ranks agree on whether c was aborted. With
//    the exact sequence 2c+2, before and after copying, the text is that of c and not torn; otherwise only
//    the fact is reported.
//  - In the second barrier of c no rank can have aborted c (it would not have stored 2c+1, which all ranks
//  saw), and
//    records of later calls do not concern r, which will still see 2c+2 from all.
// All ranks therefore either pass the first barrier of c or leave c by an exception, and continue with c+1.
//
// Fatal ends. On expiry a rank writes to each peer whom it blames, once; so does `abort_fatal`. A rank that
// finds such a record raises PeerTimeout naming the blamed ranks (not the messenger), or PeerAborted if it is
// itself blamed or the record is an abort. From then on it is broken: every later call raises the same error
// at once. A record of a later call does not disturb a barrier that is complete: its writer had passed that
// barrier. Who is blamed: not every rank that is missing. One that itself waits in an earlier barrier (its
// `waiting` word) is held up by the ranks missing in its own block, and they are blamed instead.
//
// One thread at a time may use a PeerComm (the workspace's mutex); waits sleep in the kernel and never spin
// for long.
#pragma once

#include <bitset>
#include <cstdint>
#include <string>
#include <vector>

#include "csrc/comm/errors.h"
#include "csrc/layout/control_block.h"

namespace mok {

class PeerComm {
  public:
    using Ranks = std::bitset<kMaxGroupRanks>;

    /// The windows of all ranks lie at multiples of stride around mine and start with their control blocks.
    PeerComm(char* my_window, int64_t stride, int rank, int num_ranks);
    PeerComm(const PeerComm&) = delete;
    PeerComm& operator=(const PeerComm&) = delete;

    static int64_t control_bytes(int num_ranks) { return control_block_bytes(num_ranks); }

    /// MOK_TIMEOUT_S, else 600; throws std::invalid_argument if it is no positive number.
    static double default_timeout();
    /// Seconds that one barrier may wait; at first default_timeout().
    void set_timeout(double seconds);
    double timeout() const { return timeout_; }

    /// Starts the next call and returns its number. A call that was left open is ended first: aborted if it
    /// never reached its first barrier, else abort_fatal (and this throws).
    uint64_t begin_call();
    /// The next of this call's two barriers. Throws PeerTimeout or PeerAborted.
    void barrier();
    /// Leaves the open call before its first barrier; the peers raise PeerAborted with the reason at once and
    /// the next call works. After the first barrier this is abort_fatal. Does nothing when no call is open or
    /// all is broken.
    void abort_call(const std::string& reason);
    /// The peers raise PeerAborted with the reason; the workspace is broken for all.
    void abort_fatal(const std::string& reason);

    bool in_call() const { return in_call_; }
    bool broken() const { return !error_.empty(); }
    /// Throws what broke the workspace, here or at a peer.
    void check();

    /// Free for the caller: written before a call's first barrier, read by the peers between the two.
    char* my_header() { return control_head(my_window_)->header; }
    const char* header(int rank) const { return control_head(window(rank))->header; }

    /// Tells the peers that no call follows. Waits until all said so, at most `seconds` (0: does not wait);
    /// returns the ranks that did not. A broken workspace does not wait.
    std::vector<int> close(double seconds);

  private:
    char* window(int rank) const { return my_window_ + (rank - rank_) * stride_; }
    const PeerSlot& own_slot(int rank) const { return *control_slot(my_window_, rank); }
    PeerSlot& my_slot_at(int rank) const { return *control_slot(window(rank), rank_); }

    template <typename Done>
    bool wait(double seconds, Done done);
    Ranks missing(int rank, uint64_t epoch) const;
    Ranks find_blamed(uint64_t epoch) const;
    void throw_if_call_aborted();
    void throw_if_fatal(uint64_t first_ignored_call);
    [[noreturn]] void expire(uint64_t epoch);
    [[noreturn]] void fail(bool is_timeout, const std::string& text);
    [[noreturn]] void rethrow() const;
    void write_fatal(FatalKind kind, const Ranks& blamed, const std::string& reason);
    std::string position() const;

    char* my_window_;
    int64_t stride_;
    int rank_;
    int num_ranks_;
    double timeout_;
    double spin_seconds_;
    uint64_t next_call_ = 0;
    uint64_t call_ = 0;
    int barriers_passed_ = 0;
    bool in_call_ = false;
    bool closed_ = false;
    std::string error_;  // what broke the workspace; empty while it works
    bool error_is_timeout_ = false;
};

/// "rank 3", "ranks 1, 2 and 5".
std::string name_ranks(const std::vector<int>& ranks);

}  // namespace mok
