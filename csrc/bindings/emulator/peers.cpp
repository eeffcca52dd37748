// Barriers between emulated ranks: each rank's stream is a list of operations as a test wants them.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/bindings/emulator/session.h"
#include "csrc/launch/peer_barrier.h"
#include "csrc/launch/peer_tests.h"
#include "csrc/layout/check.h"

namespace py = pybind11;

namespace mok::emulator {

namespace {

/// (name, number): "push" a value to all windows, "barrier" of a phase, "pull" the own words, "rounds" of
/// barriers in one kernel, "end" of the workspace.
using Operation = std::tuple<std::string, int64_t>;
constexpr char kReason[] = "a test ends here";
constexpr int64_t kWords = 64;  // of a window, behind the control block
constexpr size_t kLimitAt = offsetof(ControlHead, device) + offsetof(DeviceState, limit_ns);

class PeerRun {
  public:
    PeerRun(const std::vector<std::vector<Operation>>& streams, int64_t limit_ns)
        : num_ranks_(static_cast<int>(streams.size())), data_(control_block_bytes(num_ranks_)) {
        add_windows(limit_ns);
        for (int rank = 0; rank < num_ranks_; ++rank) add_stream(rank, streams[static_cast<size_t>(rank)]);
    }

    std::tuple<py::list, emu::RunResult> run(const emu::RunOptions& options) {
        const emu::RunResult result = session_.run(options);
        py::list ranks;
        for (int rank = 0; rank < num_ranks_; ++rank) ranks.append(outcome(rank));
        return {ranks, result};
    }

  private:
    void add_windows(int64_t limit_ns) {
        std::vector<py::array> windows;
        for (int rank = 0; rank < num_ranks_; ++rank) {
            py::array_t<uint8_t> window(static_cast<py::ssize_t>(data_ + 8 * kWords));
            std::memset(window.mutable_data(), 0, static_cast<size_t>(window.nbytes()));
            std::memcpy(window.mutable_data() + kLimitAt, &limit_ns, sizeof(limit_ns));
            windows.push_back(window);
        }
        windows_ = session_.add_windows("window", windows, Use{false, false, true, /* is_input */ false});
    }

    char* window(int rank) const { return static_cast<char*>(windows_[static_cast<size_t>(rank)]); }

    void add_stream(int rank, const std::vector<Operation>& operations) {
        py::array_t<uint8_t> record(static_cast<py::ssize_t>(sizeof(PeerRecord)));
        py::array_t<uint32_t> counts(std::vector<py::ssize_t>{2});
        int64_t pulls = 0;
        for (const Operation& each : operations) pulls += std::get<0>(each) == "pull";
        py::array_t<int64_t> seen(std::vector<py::ssize_t>{pulls, num_ranks_});
        std::memset(record.mutable_data(), 0, sizeof(PeerRecord));
        std::fill_n(counts.mutable_data(), counts.size(), 0u);
        std::fill_n(seen.mutable_data(), seen.size(), -1);
        const auto out = [&](const char* name, py::array& array) {
            return session_.add(name, array, Use{true, false, false, false}, rank);
        };
        const int64_t stride = num_ranks_ > 1 ? window(1) - window(0) : 0;
        const PeerGroup group{window(rank), stride, static_cast<PeerRecord*>(out("record", record)), rank,
                              num_ranks_};
        auto* words = static_cast<uint32_t*>(out("counts", counts));
        auto* pulled = static_cast<int64_t*>(out("seen", seen));
        for (const auto& [name, number] : operations) add(group, name, number, words, pulled);
        records_.push_back(record);
        counts_.push_back(counts);
        seen_.push_back(seen);
    }

    void add(const PeerGroup& group, const std::string& name, int64_t number, uint32_t* counts,
             int64_t*& pulled) {
        void* stream = &session_.stream(group.rank);
        const int64_t row = 8 * num_ranks_;
        if (name == "push") {
            const py::array_t<int64_t> value(1, &number);
            const void* source = session_.add("value", value, kInput, group.rank);
            for (int peer = 0; peer < num_ranks_; ++peer) {
                launch::launch_copy_words(window(peer) + data_ + 8 * group.rank, source, 8, stream);
            }
        } else if (name == "pull") {
            launch::launch_copy_words(pulled, group.window + data_, row, stream);
            pulled += num_ranks_;
        } else if (name == "barrier") {
            launch::launch_peer_barrier(group, static_cast<PeerPhase>(number), stream);
        } else if (name == "rounds") {
            launch::launch_peer_rounds(
                {group, false, static_cast<uint32_t>(number), data_, 1, counts, counts + 1}, stream);
        } else if (name == "end") {
            launch::launch_peer_end(group, kReason, stream);
        } else {
            MOK_CHECK(false, "operation is '", name, "'; it must be push, pull, barrier, rounds or end.");
        }
    }

    py::dict outcome(int rank) const {
        const size_t r = static_cast<size_t>(rank);
        const auto& record = *reinterpret_cast<const PeerRecord*>(records_[r].data());
        py::dict result;
        result["seen"] = seen_[r];
        result["wrong"] = counts_[r].data()[0];
        result["passed"] = counts_[r].data()[1];
        result["complete"] = record.complete;
        result["by"] = record.by;
        result["phase"] = record.phase;
        result["epoch"] = record.epoch;
        result["epochs"] = std::vector<uint64_t>(record.seen, record.seen + num_ranks_);
        result["wait_complete"] = record.wait.complete;
        result["wait_peer"] = record.wait.peer;
        result["told"] = record.told.kind;
        const auto* text = reinterpret_cast<const char*>(record.told.reason.words);
        result["reason"] = std::string(text, record.told.reason.bytes);
        return result;
    }

    const int num_ranks_;
    const int64_t data_;
    Session session_;
    std::vector<void*> windows_;
    std::vector<py::array_t<uint8_t>> records_;
    std::vector<py::array_t<uint32_t>> counts_;
    std::vector<py::array_t<int64_t>> seen_;
};

}  // namespace

void bind_peers(py::module_& module) {
    module.attr("END_REASON") = kReason;
    module.def(
        "run_peers",
        [](const std::vector<std::vector<Operation>>& streams, int64_t limit_ns,
           const emu::RunOptions& options) { return PeerRun(streams, limit_ns).run(options); },
        py::arg("streams"), py::arg("limit_ns"), py::arg("options"),
        "Runs each rank's operations and returns (outcome of each rank, RunResult).");
}

}  // namespace mok::emulator
