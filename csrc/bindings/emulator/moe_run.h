// A BF16 megakernel on all emulated ranks, between two barriers, with schedules made by the host: what both
// passes have in common.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "csrc/bindings/emulator/session.h"
#include "csrc/bindings/emulator/trace.h"
#include "csrc/launch/weight_view.h"
#include "csrc/layout/peer_record.h"
#include "csrc/schedule/host_schedule.h"
#include "csrc/schedule/prepared.h"

namespace mok::emulator {

constexpr int64_t kBfloat16Bytes = 2, kFloatBytes = 4;

/// Rows first, first + step, ... of uint16 [experts, R, K], given as (array, first, step, rows).
launch::WeightView weight_view(Session& session, const std::string& name, const pybind11::object& argument,
                               int rank);

/// The names that `layer` and each of `ranks` have are in the docstrings of the module's functions. An array
/// that a rank does not have is null for its kernel.
class MoeRun {
  public:
    /// `home_arrays`: the ranks' arrays that lie in windows, because peers read or write them.
    struct HomeArray {
        const char* name;
        bool is_output;
    };
    MoeRun(const pybind11::dict& layer, const std::vector<pybind11::dict>& ranks, schedule::Pass pass,
           const std::vector<HomeArray>& home_arrays);
    virtual ~MoeRun() = default;

    /// Launches everything and runs it; throws EmulatorError where a kernel erred, or where a counter ends
    /// with another value than the schedule says.
    emu::RunResult run(const emu::RunOptions& options);

  protected:
    /// The pass's own kernel.
    virtual void add_launch(int rank) = 0;

    int64_t size(const char* name) const { return layer_[name].cast<int64_t>(); }
    bool flag(const char* name) const { return layer_.contains(name) && layer_[name].cast<bool>(); }
    int64_t row_bytes() const { return size("hidden") * kBfloat16Bytes; }
    int64_t tokens(int rank) const { return ranks_[rank]["x"].cast<pybind11::array>().shape(0); }
    bool has(int rank, const std::string& name) const { return ranks_[rank].contains(name); }
    /// Rows of the saved context, 0 without one.
    int64_t save_rows(int rank) const;

    /// A rank's array as constant memory, and as memory that its kernel writes.
    char* input(int rank, const std::string& name);
    void* output(int rank, const std::string& name);
    template <typename T = void>
    T* scratch(int rank, const char* name, int64_t rows, int64_t columns, int64_t bytes = kBfloat16Bytes) {
        if (rows * columns == 0) return nullptr;
        return static_cast<T*>(session_.scratch(name, static_cast<size_t>(rows * columns * bytes), rank));
    }

    /// Where an array of `home_arrays` lies in the rank's window.
    char* home(int rank, const std::string& name) const;
    int64_t window_stride() const { return stride_; }

    launch::MoeExpertViews experts(int rank, const std::string& prefix);

    /// What both kernels are told: shape, call, experts, own rows, saved x, limits.
    template <typename Kernel>
    void set_call(int rank, Kernel& kernel) {
        kernel.limits = limits(rank);
        kernel.shape = schedules_[rank]->shape();
        kernel.call = prepared(rank, kernel.limits);
        kernel.routed = experts(rank, "");
        kernel.shared = experts(rank, "shared_");
        kernel.x = inputs_[rank].x;
        kernel.x_stride = row_bytes();
        kernel.home_rows = home(rank, "home_rows");
        kernel.window_stride = window_stride();
        kernel.shared_rows = output(rank, "shared_rows");
        kernel.save_rows = save_rows(rank);
        kernel.activation = static_cast<int32_t>(size("activation"));
        kernel.limit = layer_["limit"].template cast<float>();
        kernel.rank = rank;
    }

    /// With the rank's "trace" its time line is recorded there.
    template <typename Kernel>
    void launch_traced(int rank, Kernel& kernel, void (*launch)(const Kernel&, void*)) {
        const TraceMemory trace(session_, ranks_[rank], rank);
        kernel.spans = trace.spans();
        void* stream = &session_.stream(rank);
        trace.stamp(CallMoment::kPrepared, kernel.shape, nullptr, stream);
        launch(kernel, stream);
        trace.stamp(CallMoment::kComputed, kernel.shape, &kernel.call, stream);
    }

    const pybind11::dict layer_;
    std::vector<pybind11::dict> ranks_;
    const int num_ranks_;
    Session session_;
    std::vector<schedule::RankInputs> inputs_;

  private:
    void add_schedule(int rank, schedule::Pass pass);
    void add_windows(const std::vector<HomeArray>& home_arrays);
    template <typename T>
    const T* values(int rank, const char* name, const T* data, int64_t count);
    schedule::PreparedCall prepared(int rank, const ptx::WaitLimits& limits);
    ptx::WaitLimits limits(int rank);
    bool has_ended(int rank) const;
    void check_counters(int rank) const;
    launch::BiasView bias(int rank, const std::string& name);

    std::vector<std::unique_ptr<schedule::HostSchedule>> schedules_;
    std::vector<pybind11::array_t<uint32_t>> counters_;
    std::vector<PeerGroup> groups_;
    std::vector<std::pair<std::string, std::vector<void*>>> homes_;
    int64_t stride_ = 0;
};

}  // namespace mok::emulator
