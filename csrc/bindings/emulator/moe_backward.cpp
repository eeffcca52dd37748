// The backward megakernel of all ranks on the emulated machine, between two barriers, with schedules made by
// the host.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "csrc/bindings/emulator/session.h"
#include "csrc/launch/peer_barrier.h"
#include "csrc/launch/sm90_bf16_moe_backward.h"
#include "csrc/layout/check.h"
#include "csrc/layout/window.h"
#include "csrc/schedule/host_schedule.h"

namespace py = pybind11;

namespace mok::emulator {

namespace {

constexpr int64_t kElementBytes = 2, kFloatBytes = 4, kPartialColumns = 64;
constexpr uint64_t kLimitNs = 1'000'000'000'000;  // virtual time

/// What `layer` and each of `ranks` hold is in the docstring of moe_backward.
class BackwardRun {
  public:
    BackwardRun(const py::dict& layer, const std::vector<py::dict>& ranks)
        : layer_(layer), ranks_(ranks), num_ranks_(static_cast<int>(ranks.size())) {
        for (int rank = 0; rank < num_ranks_; ++rank) add_schedule(rank);
        add_windows();
        for (int rank = 0; rank < num_ranks_; ++rank) {
            inputs_.push_back(
                {array(rank, "x"), array(rank, "dout"), row_bytes(), row_bytes(), tokens(rank)});
        }
        for (int rank = 0; rank < num_ranks_; ++rank) {
            void* stream = &session_.stream(rank);
            launch::launch_peer_barrier(group(rank), PeerPhase::kInputs, stream);
            add_launch(rank);
            launch::launch_peer_barrier(group(rank), PeerPhase::kOutputs, stream);
        }
    }

    emu::RunResult run(const emu::RunOptions& options) {
        emu::RunResult result = session_.run(options);
        for (int rank = 0; rank < num_ranks_ && result.trapped.empty(); ++rank) {
            if (!has_ended(rank)) check_counters(rank);
            move_window(rank, layout_.rows, "home_rows", false);
            move_window(rank, layout_.dweights, "home_weight_grads", false);
        }
        return result;
    }

  private:
    int64_t size(const char* name) const { return layer_[name].cast<int64_t>(); }
    int64_t row_bytes() const { return size("hidden") * kElementBytes; }
    int64_t tokens(int rank) const { return ranks_[rank]["x"].cast<py::array>().shape(0); }
    bool has(int rank, const std::string& name) const { return ranks_[rank].contains(name); }

    /// Constant memory with a rank's array; null where it has none of that name.
    char* array(int rank, const std::string& name) {
        if (!has(rank, name)) return nullptr;
        const bool is_own = name != "x" && name != "dout";
        return static_cast<char*>(session_.add(name, ranks_[rank][name.c_str()].cast<py::array>(),
                                               Use{false, true, !is_own, true}, rank));
    }
    template <typename T>
    const T* values(int rank, const char* name, const T* data, int64_t count) {
        if (count == 0) return nullptr;
        const py::array_t<uint8_t> bytes(static_cast<py::ssize_t>(count * sizeof(T)),
                                         reinterpret_cast<const uint8_t*>(data));
        return static_cast<const T*>(session_.add(name, bytes, kInput, rank));
    }
    void* output(int rank, const std::string& name) {
        if (!has(rank, name)) return nullptr;
        return session_.add(name, ranks_[rank][name.c_str()].cast<py::array>(), kOutput, rank);
    }
    template <typename T = void>
    T* scratch(int rank, const char* name, int64_t rows, int64_t columns, int64_t bytes = kElementBytes) {
        if (rows * columns == 0) return nullptr;
        return static_cast<T*>(session_.scratch(name, static_cast<size_t>(rows * columns * bytes), rank));
    }

    void add_schedule(int rank) {
        const PlanShape plan_shape{rank,
                                   num_ranks_,
                                   static_cast<int32_t>(size("num_experts")),
                                   static_cast<int32_t>(size("top_k")),
                                   size("max_tokens"),
                                   kDefaultPad};
        schedule::ScheduleSizes sizes{};
        sizes.pass = schedule::Pass::kBackward;
        sizes.save = static_cast<schedule::Save>(size("save"));
        sizes.hidden = size("hidden");
        sizes.intermediate = size("intermediate");
        sizes.shared_intermediate = size("shared_intermediate");
        sizes.num_tokens = tokens(rank);
        sizes.num_local_experts = plan_shape.num_local_experts();
        sizes.ring_rows = size("ring_rows");
        sizes.gradients = size("gradients");
        sizes.zero_idle = size("accumulate") == 0;
        sizes.num_sms = static_cast<int32_t>(size("num_blocks"));
        sizes.row_bytes = row_bytes();
        const schedule::KernelConfig& config =
            *schedule::choose_config(schedule::Arch::kSm90, sizes.intermediate);
        schedule::check_schedule(plan_shape, sizes, config);
        using Ids = py::array_t<int32_t, py::array::c_style>;
        std::vector<Ids> ids;
        std::vector<RankRoutes> routes;
        for (int source = 0; source < num_ranks_; ++source) {
            ids.push_back(ranks_[source]["ids"].cast<Ids>());
            routes.push_back({ids.back().data(), tokens(source)});
        }
        Plan plan;
        build_plan(plan_shape, routes.data(), plan);
        schedules_.push_back(std::make_unique<schedule::HostSchedule>(
            plan_shape, schedule::make_schedule_shape(sizes, config), std::move(plan)));
    }

    /// The control block, then what ranks exchange.
    void add_windows() {
        const int64_t control = control_block_bytes(num_ranks_);
        layout_ = window_layout(control, size("max_tokens"), size("top_k"), size("hidden"), DType::kBFloat16);
        for (int rank = 0; rank < num_ranks_; ++rank) {
            py::array_t<uint8_t> window(static_cast<py::ssize_t>(layout_.bytes));
            std::memset(window.mutable_data(), 0xff, static_cast<size_t>(layout_.bytes));
            std::memset(window.mutable_data(), 0, static_cast<size_t>(control));
            control_head(reinterpret_cast<char*>(window.mutable_data()))->device.limit_ns = kLimitNs;
            images_.push_back(window);
            move_window(rank, layout_.weights, "weights", true);
            move_window(rank, layout_.rows, "home_rows", true);
            move_window(rank, layout_.dweights, "home_weight_grads", true);
        }
        // Peers touch the control block before this rank's first kernel.
        const Use use{true, false, true, /* is_input */ false};
        const std::vector<py::array> images(images_.begin(), images_.end());
        for (void* window : session_.add_windows("window", images, use)) {
            windows_.push_back(static_cast<char*>(window));
            records_.push_back(static_cast<PeerRecord*>(
                session_.zeros("record", sizeof(PeerRecord), static_cast<int>(records_.size()))));
        }
        stride_ = num_ranks_ > 1 ? windows_[1] - windows_[0] : 0;
    }

    /// Between a rank's array and the image of its window.
    void move_window(int rank, int64_t offset, const char* name, bool into_window) {
        py::array array = ranks_[rank][name].cast<py::array>();
        uint8_t* at = images_[rank].mutable_data() + offset;
        const size_t bytes = static_cast<size_t>(array.nbytes());
        if (into_window) {
            std::memcpy(at, array.data(), bytes);
        } else {
            std::memcpy(array.mutable_data(), at, bytes);
        }
    }

    PeerGroup group(int rank) const { return {windows_[rank], stride_, records_[rank], rank, num_ranks_}; }

    schedule::PreparedCall prepared(int rank, const ptx::WaitLimits& limits) {
        const schedule::HostSchedule& host = *schedules_[rank];
        schedule::Table table = host.table();
        const auto add = [&](const char* name, auto*& data, int64_t count) {
            data = const_cast<std::remove_reference_t<decltype(data)>>(values(rank, name, data, count));
        };
        if (layer_.contains("lose_pulls")) table.num_pulls = 0;
        const int64_t experts = host.shape().sizes.num_local_experts;
        add("chunks", table.chunks, table.num_chunks + 1);
        add("pieces", table.pieces, table.num_pieces + 1);
        add("runs", table.runs, table.num_runs + 1);
        add("unit_begin", table.unit_begin, table.num_pieces + 1);
        add("idle_experts", table.idle_experts, table.num_idle);
        add("segment_begin", table.segment_begin, experts + 1);
        add("counts", table.counts, experts);
        schedule::PullUnits units = host.units();
        const int64_t num_rows = units.row_begin[units.num_units];
        add("units", units.units, units.num_units);
        add("unit_rows_begin", units.row_begin, units.num_units + 1);
        add("unit_rows", units.rows, num_rows);
        schedule::PreparedCall call{};
        call.expired = limits.expired;
        call.table = values(rank, "table", &table, 1);
        call.units = values(rank, "pull_units", &units, 1);
        call.ranks = values(rank, "rank_inputs", inputs_.data(), num_ranks_);
        call.row_peer = values(rank, "row_peer", host.plan().row_peer.data(), host.plan().num_rows());
        call.row_slot = values(rank, "row_slot", host.plan().row_slot.data(), host.plan().num_rows());
        call.task_claim = static_cast<uint32_t*>(session_.zeros("task claim", 4, rank));
        call.pull_claim = static_cast<uint32_t*>(session_.zeros("pull claim", 4, rank));
        const int64_t count =
            schedule::counter_layout(host.shape(), host.table()).begin[schedule::kNumCounters];
        py::array_t<uint32_t> counters(count);
        std::memset(counters.mutable_data(), 0, static_cast<size_t>(counters.nbytes()));
        counters_.push_back(counters);
        call.counters = static_cast<uint32_t*>(session_.add("counters", counters, kOutput, rank));
        return call;
    }

    /// uint32 [80] of a rank: the word `expired`, and a WaitRecord from byte 256 on.
    ptx::WaitLimits limits(int rank) {
        constexpr size_t kRecordAt = 256;
        if (!has(rank, "limits")) return session_.limits(rank);
        char* memory = static_cast<char*>(output(rank, "limits"));
        return {kLimitNs, reinterpret_cast<uint32_t*>(memory),
                reinterpret_cast<ptx::WaitRecord*>(memory + kRecordAt), rank};
    }
    bool has_ended(int rank) const {
        if (!has(rank, "limits")) return false;
        return ranks_[rank]["limits"].cast<py::array_t<uint32_t>>().at(0) != 0;
    }

    /// Every counter has the value that the schedule says.
    void check_counters(int rank) const {
        const schedule::ScheduleShape& shape = schedules_[rank]->shape();
        const schedule::Table& table = schedules_[rank]->table();
        const schedule::CounterLayout layout = schedule::counter_layout(shape, table);
        for (int32_t c = 0; c < schedule::kNumCounters; ++c) {
            for (int64_t at = layout.begin[c]; at < layout.begin[c + 1]; ++at) {
                const int32_t index = static_cast<int32_t>(at - layout.begin[c]);
                const int64_t wanted =
                    schedule::final_value(shape, table, static_cast<schedule::Counter>(c), index);
                const int64_t found = counters_[rank].at(at);
                if (found == wanted) continue;
                throw EmulatorError(concat("rank ", rank, ": counter ", c, " [", index, "] ends with ", found,
                                           ", not ", wanted));
            }
        }
    }

    /// (array, first row, row step, rows).
    launch::WeightView weights(int rank, const std::string& name) {
        if (!has(rank, name)) return {};
        const auto [data, first, step, rows] =
            ranks_[rank][name.c_str()].cast<std::tuple<py::array, int64_t, int64_t, int64_t>>();
        const int64_t line = data.shape(2) * kElementBytes;
        launch::WeightView view;
        view.experts = data.shape(0);
        view.rows = rows;
        view.columns = data.shape(2);
        view.expert_stride = data.shape(1) * line;
        view.row_stride = step * line;
        view.data = static_cast<char*>(session_.add(name, data, kInput, rank)) + first * line;
        return view;
    }
    launch::BiasView bias(int rank, const std::string& name) {
        if (!has(rank, name)) return {};
        return {array(rank, name), ranks_[rank][name.c_str()].cast<py::array>().shape(1) * kElementBytes};
    }
    launch::MoeExpertViews experts(int rank, const std::string& prefix) {
        return {weights(rank, prefix + "w_gate"), weights(rank, prefix + "w_up"),
                weights(rank, prefix + "w_down"), bias(rank, prefix + "b_gate"),
                bias(rank, prefix + "b_up"),      bias(rank, prefix + "b_down")};
    }

    launch::GradientView gradient(int rank, const std::string& name) {
        if (!has(rank, name)) return {};
        const py::array data = ranks_[rank][name.c_str()].cast<py::array>();
        launch::GradientView view;
        view.data = output(rank, name);
        view.is_float32 = data.itemsize() == kFloatBytes;
        view.expert_stride = data.strides(0);
        view.row_stride = data.ndim() == 3 ? data.strides(1) : 0;
        return view;
    }
    launch::MoeGradientViews gradients(int rank, const std::string& prefix) {
        launch::MoeGradientViews views;
        const char* names[] = {"gate", "up", "down"};
        for (int m = 0; m < schedule::kNumMatrices; ++m) {
            views.weights[m] = gradient(rank, prefix + "dw_" + names[m]);
            views.biases[m] = gradient(rank, prefix + "db_" + names[m]);
        }
        return views;
    }

    void add_ring(int rank, launch::MoeBackward& backward) {
        const int64_t rows = size("ring_rows"), hidden = size("hidden"), inner = size("intermediate");
        backward.ring_x = scratch(rank, "ring_x", rows, hidden);
        backward.ring_dout = scratch(rank, "ring_dout", rows, hidden);
        backward.ring_gate = scratch(rank, "ring_gate", rows, inner);
        backward.ring_up = scratch(rank, "ring_up", rows, inner);
        backward.ring_dgate = scratch(rank, "ring_dgate", rows, inner);
        backward.ring_dup = scratch(rank, "ring_dup", rows, inner);
        backward.ring_hidden = scratch(rank, "ring_hidden", rows, inner);
        backward.ring_partials =
            scratch<float>(rank, "ring_partials", rows, ceil_div(inner, kPartialColumns), kFloatBytes);
        backward.ring_weights = scratch<float>(rank, "ring_weights", rows, 1, kFloatBytes);
        backward.accumulators = scratch<float>(
            rank, "accumulators", launch::moe_backward_accumulators(hidden, inner), 1, kFloatBytes);
    }

    void add_shared(int rank, launch::MoeBackward& backward) {
        const int64_t rows = tokens(rank), inner = size("shared_intermediate");
        const bool is_saved = size("save") != 0;
        backward.shared = experts(rank, "shared_");
        backward.shared_gate =
            is_saved ? array(rank, "saved_shared_gate") : scratch(rank, "shared_gate", rows, inner);
        backward.shared_up =
            is_saved ? array(rank, "saved_shared_up") : scratch(rank, "shared_up", rows, inner);
        backward.shared_dgate = scratch(rank, "shared_dgate", rows, inner);
        backward.shared_dup = scratch(rank, "shared_dup", rows, inner);
        backward.shared_hidden = scratch(rank, "shared_hidden", rows, inner);
        backward.shared_partials =
            scratch<float>(rank, "shared_partials", rows, ceil_div(inner, kPartialColumns), kFloatBytes);
        backward.shared_rows = output(rank, "shared_rows");
        backward.shared_weight = reinterpret_cast<const float*>(array(rank, "shared_weight"));
        backward.shared_weight_grads = static_cast<float*>(output(rank, "shared_weight_grads"));
        backward.shared_gradients = gradients(rank, "shared_");
    }

    void add_launch(int rank) {
        launch::MoeBackward backward{};
        backward.limits = limits(rank);
        backward.shape = schedules_[rank]->shape();
        backward.call = prepared(rank, backward.limits);
        backward.routed = experts(rank, "");
        backward.x = inputs_[rank].x;
        backward.dout = inputs_[rank].dout;
        backward.x_stride = backward.dout_stride = row_bytes();
        add_ring(rank, backward);
        add_shared(rank, backward);
        backward.saved_x = array(rank, "saved_x");
        backward.saved_gate = array(rank, "saved_gate");
        backward.saved_up = array(rank, "saved_up");
        if (has(rank, "saved_gate")) {
            backward.save_rows = ranks_[rank]["saved_gate"].cast<py::array>().shape(0);
        }
        backward.weights = reinterpret_cast<const float*>(windows_[rank] + layout_.weights);
        backward.home_rows = windows_[rank] + layout_.rows;
        backward.home_weight_grads = reinterpret_cast<float*>(windows_[rank] + layout_.dweights);
        backward.window_stride = stride_;
        backward.routed_gradients = gradients(rank, "");
        backward.accumulate = size("accumulate") != 0;
        backward.activation = static_cast<int32_t>(size("activation"));
        backward.limit = layer_["limit"].cast<float>();
        backward.rank = rank;
        launch::launch_sm90_bf16_moe_backward(backward, &session_.stream(rank));
    }

    py::dict layer_;
    std::vector<py::dict> ranks_;
    int num_ranks_;
    WindowLayout layout_{};
    int64_t stride_ = 0;
    Session session_;
    std::vector<std::unique_ptr<schedule::HostSchedule>> schedules_;
    std::vector<py::array_t<uint8_t>> images_;  // of the windows
    std::vector<char*> windows_;
    std::vector<PeerRecord*> records_;
    std::vector<schedule::RankInputs> inputs_;
    std::vector<py::array_t<uint32_t>> counters_;
};

emu::RunResult moe_backward(const py::dict& layer, const std::vector<py::dict>& ranks,
                            const emu::RunOptions& options) {
    return BackwardRun(layer, ranks).run(options);
}

}  // namespace

void bind_moe_backward(py::module_& module) {
    module.def(
        "moe_backward", &moe_backward, py::arg("layer"), py::arg("ranks"), py::arg("options"),
        "The backward megakernel on all ranks. `layer` holds numbers: num_experts, top_k, max_tokens, "
        "hidden, intermediate, shared_intermediate, ring_rows, save, activation, limit, num_blocks, "
        "gradients (mask), accumulate; with lose_pulls nobody fetches rows. A rank holds NumPy arrays, BF16 "
        "as uint16: x, dout [T, H], ids, "
        "weights [T, K], w_gate, w_up, w_down as (array, first row, row step, rows), b_*, the same "
        "with shared_, saved_*, shared_weight [T]; and results, filled where they are given: home_rows "
        "[max_tokens * K, H], home_weight_grads [max_tokens * K], shared_rows, shared_weight_grads, "
        "dw_*, db_*, shared_dw_*, limits (uint32 [80]: expired, a WaitRecord from byte 256 on).");
}

}  // namespace mok::emulator
