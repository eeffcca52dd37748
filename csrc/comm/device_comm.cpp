#include "csrc/comm/device_comm.h"

#include <stdexcept>
#include <vector>

#include "csrc/comm/errors.h"
#include "csrc/comm/peer_comm.h"
#include "csrc/comm/shared_memory.h"
#include "csrc/layout/call_header.h"
#include "csrc/layout/check.h"

namespace mok {
namespace {

constexpr const char* kUnusable = "; on a GPU the workspace is unusable from then on: build the layer anew";

std::string name_phase(uint32_t phase) {
    switch (static_cast<PeerPhase>(phase)) {
        case PeerPhase::kInputs:
            return "the first barrier of a call";
        case PeerPhase::kOutputs:
            return "the second barrier of a call";
    }
    return concat("barrier ", phase);
}

std::string seconds_text(double seconds) {
    return concat(seconds < 10 ? static_cast<double>(static_cast<int64_t>(seconds * 100 + 0.5)) / 100
                               : static_cast<double>(static_cast<int64_t>(seconds + 0.5)),
                  " s");
}

}  // namespace

ptx::WaitLimits DeviceComm::limits() const {
    return {static_cast<uint64_t>(timeout_ * 1e9), &control_head(group_.window)->device.expired,
            &group_.record->wait, group_.rank};
}

void DeviceComm::check() {
    const std::lock_guard lock(mutex_);
    read_record();
    if (error_.empty()) return;
    if (kind_ == Error::kTimeout) throw PeerTimeout(error_);
    if (kind_ == Error::kMismatch) throw std::invalid_argument(error_);
    throw PeerAborted(error_);
}

void DeviceComm::end(const std::string& reason) {
    const std::lock_guard lock(mutex_);
    read_record();
    if (error_.empty()) {
        error_ = concat("rank ", group_.rank, " itself ended its calls: ", shared::fitting(reason), kUnusable,
                        ".");
    }
}

bool DeviceComm::ended() {
    const std::lock_guard lock(mutex_);
    read_record();
    return !error_.empty();
}

void DeviceComm::read_record() {
    if (!error_.empty()) return;
    if (shared::load_acquire(record_->complete) != 0) {
        if (static_cast<FatalKind>(record_->told.kind) == FatalKind::kMismatch) return describe_difference();
        if (record_->by == group_.rank) return describe_expired();
        return describe_told(record_->told, record_->by, record_->phase);
    }
    if (shared::load_acquire(record_->wait.complete) != 0) describe_wait();
}

void DeviceComm::describe_told(const FatalRecord& told, int by, uint32_t phase) {
    if (static_cast<FatalKind>(told.kind) == FatalKind::kAbort) {
        error_ =
            concat("rank ", group_.rank, " was in ", name_phase(phase), " (epoch ", record_->epoch,
                   ") when rank ", by, " ended its calls: ", shared::read_text(told.reason), kUnusable, ".");
        return;
    }
    std::vector<int> blamed;
    bool is_me = false;
    for (int r = 0; r < group_.num_ranks; ++r) {
        if (((told.blamed[r / 64] >> (r % 64)) & 1) == 0) continue;
        blamed.push_back(r);
        is_me |= r == group_.rank;
    }
    const std::string waited = seconds_text(static_cast<double>(told.milliseconds) / 1000.0);
    const std::string where = name_phase(static_cast<uint32_t>(told.barrier));
    if (is_me || blamed.empty()) {
        error_ = concat("rank ", by, " waited ", waited, " for this rank (", group_.rank, ") in ", where,
                        " (epoch ", told.call,
                        ") and gave up; this rank was too slow or stopped (MOK_TIMEOUT_S sets the time).");
        return;
    }
    kind_ = Error::kTimeout;
    error_ = concat("rank ", group_.rank, " was told by rank ", by, " that ", name_ranks(blamed),
                    " did not arrive in ", where, " (epoch ", told.call, ") within ", waited, ".");
}

void DeviceComm::describe_difference() {
    kind_ = Error::kMismatch;
    error_ = describe_mismatch(record_->headers[0], group_.rank, record_->headers[1], record_->by);
    if (!error_.empty()) error_.pop_back();  // the full stop
    error_ += concat(kUnusable, ".");
}

void DeviceComm::describe_expired() {
    std::vector<int> blamed;
    std::string seen;
    for (int r = 0; r < group_.num_ranks; ++r) {
        if (r == group_.rank || static_cast<int64_t>(record_->seen[r] - record_->epoch) >= 0) continue;
        blamed.push_back(r);
        seen += concat(seen.empty() ? "" : ", ", record_->seen[r], " from rank ", r);
    }
    // A rank that arrived while this one was giving up.
    if (blamed.empty()) return describe_wait();
    kind_ = Error::kTimeout;
    error_ = concat(
        "rank ", group_.rank, " waited ", seconds_text(static_cast<double>(record_->wait.waited_ns) / 1e9),
        " in ", name_phase(record_->phase), " for ", name_ranks(blamed), " (expected epoch ", record_->epoch,
        ", saw ", seen,
        "); the process died, hangs or needs longer (MOK_TIMEOUT_S sets the time). The CUDA context of "
        "this process is lost: restart it.");
}

void DeviceComm::describe_wait() {
    const ptx::WaitRecord& wait = record_->wait;
    const std::string whom = wait.peer >= 0
                                 ? concat("for rank ", wait.peer)
                                 : std::string("for other blocks of its own GPU, which did not all run");
    kind_ = Error::kTimeout;
    error_ = concat("rank ", group_.rank, " waited ", seconds_text(static_cast<double>(wait.waited_ns) / 1e9),
                    " ", whom, " (wait ", wait.place, " of block ", wait.block, ", expected ", wait.expected,
                    ", saw ", wait.seen,
                    "; MOK_TIMEOUT_S sets the time). The CUDA context of this process is lost: restart it.");
}

}  // namespace mok
