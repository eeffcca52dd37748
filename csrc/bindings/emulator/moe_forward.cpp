// The sm_90a GEMM kernels on emulated ranks: the grouped GEMM, and the forward megakernel of all ranks with
// schedules made by the host.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/bindings/emulator/session.h"
#include "csrc/launch/peer_barrier.h"
#include "csrc/launch/sm90_bf16_grouped_gemm.h"
#include "csrc/launch/sm90_bf16_moe_forward.h"
#include "csrc/layout/check.h"
#include "csrc/schedule/host_schedule.h"

namespace py = pybind11;

namespace mok::emulator {

namespace {

constexpr int64_t kElementBytes = 2;
constexpr uint64_t kLimitNs = 1'000'000'000'000;  // virtual time; waits expire where a run asks for it

/// Constant memory with a copy of `count` values; null for none.
template <typename T>
T* constant(Session& session, const std::string& name, const T* values, int64_t count, int rank) {
    if (count == 0) return nullptr;
    const py::array_t<uint8_t> bytes(static_cast<py::ssize_t>(count * sizeof(T)),
                                     reinterpret_cast<const uint8_t*>(values));
    return static_cast<T*>(session.add(name, bytes, kInput, rank));
}

/// uint32 [80]: the word `expired`, and a WaitRecord from byte 256 on.
ptx::WaitLimits limits_in(Session& session, const py::array& array, int rank) {
    MOK_CHECK(array.nbytes() >= 320, "limits has ", array.nbytes(), " bytes, needs 320.");
    char* memory = static_cast<char*>(session.add("limits", array, kOutput, rank));
    return {kLimitNs, reinterpret_cast<uint32_t*>(memory), reinterpret_cast<ptx::WaitRecord*>(memory + 256),
            rank};
}

/// [experts, rows, columns] of BF16 bits: `array` from row `first` on, every `step`th.
struct WeightArgument {
    py::array array;
    int64_t first = 0, step = 1, rows = 0;
};

launch::WeightView weight_view(Session& session, const std::string& name,
                               const std::optional<WeightArgument>& argument, int rank) {
    if (!argument) return {};
    const py::array& array = argument->array;
    MOK_CHECK(array.ndim() == 3 && array.itemsize() == kElementBytes, name, " must be uint16 [E, rows, K].");
    launch::WeightView view;
    view.experts = array.shape(0);
    view.rows = argument->rows;
    view.columns = array.shape(2);
    view.expert_stride = array.shape(1) * array.shape(2) * kElementBytes;
    view.row_stride = argument->step * array.shape(2) * kElementBytes;
    char* data = static_cast<char*>(session.add(name, array, kInput, rank));
    view.data = data + argument->first * array.shape(2) * kElementBytes;
    return view;
}

emu::RunResult grouped_gemm(const py::array& x, const WeightArgument& weights,
                            const py::array_t<int64_t>& segment_begin, const py::array_t<int64_t>& counts,
                            const py::array& y, const emu::RunOptions& options) {
    Session session;
    launch::GroupedGemm gemm{};
    gemm.x = session.add("x", x, kInput);
    gemm.weights = weight_view(session, "weights", weights, 0);
    gemm.y = session.add("y", y, kOutput);
    gemm.rows = x.shape(0);
    gemm.x_stride = x.shape(1) * kElementBytes;
    gemm.y_stride = y.shape(1) * kElementBytes;
    gemm.segment_begin = static_cast<const int64_t*>(session.add("segment_begin", segment_begin, kInput));
    gemm.counts = static_cast<const int64_t*>(session.add("counts", counts, kInput));
    const py::array_t<uint64_t> zero(1, std::vector<uint64_t>{0}.data());
    gemm.claim = static_cast<uint64_t*>(session.add("claim", zero, Use{}));
    launch::launch_sm90_bf16_grouped_gemm(gemm, session.limits(), &session.stream());
    return session.run(options);
}

/// Sizes and settings, equal on all ranks.
struct LayerArgument {
    int32_t num_experts, top_k;
    int64_t max_tokens, hidden, intermediate, shared_intermediate, ring_rows;
    int32_t save, activation, num_blocks;
    float limit;
    bool recompute;
    bool lose_pulls;  // nobody fetches x: waits for it run out of time
};

struct BiasArgument {
    std::optional<py::array> gate, up, down;  // uint16 [E, columns]
};

/// What one rank brings, and the arrays that its kernel fills (null: none). BF16 as uint16 bits.
struct RankArgument {
    py::array x;                                  // [T, H]
    py::array_t<int32_t> ids;                     // [T, K], -1 or an expert
    std::optional<WeightArgument> weights[2][3];  // routed, shared: gate, up, down
    BiasArgument biases[2];
    std::optional<py::array> home_rows;    // [max_tokens * K, H]
    std::optional<py::array> shared_rows;  // [T, H]
    std::optional<py::array> saved_x, saved_gate, saved_up, saved_shared_gate, saved_shared_up;
    std::optional<py::array> spans;   // uint8 [tasks, sizeof(TaskSpan)]
    std::optional<py::array> limits;  // see limits_in
};

class ForwardRun {
  public:
    ForwardRun(const LayerArgument& layer, const std::vector<RankArgument>& ranks)
        : layer_(layer), ranks_(ranks) {
        for (size_t r = 0; r < ranks_.size(); ++r) add_schedule(static_cast<int>(r));
        std::vector<py::array> windows;
        for (const RankArgument& rank : ranks_) windows.push_back(rank.home_rows.value());
        windows_ = session_.add_windows("home_rows", windows, kPeerOutput);
        for (size_t r = 0; r < ranks_.size(); ++r) {
            x_.push_back(static_cast<const char*>(
                session_.add("x", ranks_[r].x, Use{false, true, true, true}, static_cast<int>(r))));
        }
        add_peer_groups();
        for (size_t r = 0; r < ranks_.size(); ++r) {
            void* stream = &session_.stream(static_cast<int>(r));
            launch::launch_peer_barrier(groups_[r], PeerPhase::kInputs, stream);
            add_launch(static_cast<int>(r));
            launch::launch_peer_barrier(groups_[r], PeerPhase::kOutputs, stream);
        }
    }

    emu::RunResult run(const emu::RunOptions& options) {
        emu::RunResult result = session_.run(options);
        const bool all_ran = result.trapped.empty() && !has_ended();
        for (size_t r = 0; r < ranks_.size() && all_ran; ++r) check_counters(r);
        return result;
    }

  private:
    void add_schedule(int rank) {
        PlanShape plan_shape{rank,
                             static_cast<int32_t>(ranks_.size()),
                             layer_.num_experts,
                             layer_.top_k,
                             layer_.max_tokens,
                             kDefaultPad};
        schedule::ScheduleSizes sizes{};
        sizes.pass = layer_.recompute ? schedule::Pass::kRecompute : schedule::Pass::kForward;
        sizes.save = static_cast<schedule::Save>(layer_.save);
        sizes.hidden = layer_.hidden;
        sizes.intermediate = layer_.intermediate;
        sizes.shared_intermediate = layer_.shared_intermediate;
        sizes.num_tokens = ranks_[rank].x.shape(0);
        sizes.num_local_experts = plan_shape.num_local_experts();
        sizes.ring_rows = layer_.ring_rows;
        sizes.num_sms = layer_.num_blocks;
        sizes.row_bytes = layer_.hidden * kElementBytes;
        const schedule::KernelConfig& config =
            *schedule::choose_config(schedule::Arch::kSm90, layer_.intermediate);
        schedule::check_schedule(plan_shape, sizes, config);
        std::vector<RankRoutes> routes;
        for (const RankArgument& each : ranks_) routes.push_back({each.ids.data(), each.x.shape(0)});
        Plan plan;
        build_plan(plan_shape, routes.data(), plan);
        schedules_.push_back(std::make_unique<schedule::HostSchedule>(
            plan_shape, schedule::make_schedule_shape(sizes, config), std::move(plan)));
    }

    /// Control blocks for the barriers before and after the kernels.
    void add_peer_groups() {
        const int num_ranks = static_cast<int>(ranks_.size());
        std::vector<char> block(static_cast<size_t>(control_block_bytes(num_ranks)));
        control_head(block.data())->device.limit_ns = kLimitNs;
        const py::array_t<char> array(static_cast<py::ssize_t>(block.size()), block.data());
        const std::vector<void*> windows = session_.add_windows(
            "control", std::vector<py::array>(ranks_.size(), array), Use{false, false, true, false});
        const int64_t stride =
            num_ranks > 1 ? static_cast<char*>(windows[1]) - static_cast<char*>(windows[0]) : 0;
        const std::vector<char> empty(sizeof(PeerRecord));
        const py::array_t<char> record(static_cast<py::ssize_t>(empty.size()), empty.data());
        for (int r = 0; r < num_ranks; ++r) {
            void* memory = session_.add("record", record, Use{}, emu::Region::kAnyRank);
            groups_.push_back(
                {static_cast<char*>(windows[r]), stride, static_cast<PeerRecord*>(memory), r, num_ranks});
        }
    }

    schedule::PreparedCall prepared(int rank, const ptx::WaitLimits& limits) {
        const schedule::HostSchedule& host = *schedules_[rank];
        const auto add = [&](const char* name, const auto* values, int64_t count) {
            return constant(session_, name, values, count, rank);
        };
        schedule::Table table = host.table();
        const int64_t experts = host.shape().sizes.num_local_experts;
        table.chunks = add("chunks", table.chunks, table.num_chunks + 1);
        table.pieces = add("pieces", table.pieces, table.num_pieces + 1);
        table.runs = add("runs", table.runs, table.num_runs + 1);
        table.unit_begin = add("unit_begin", table.unit_begin, table.num_pieces + 1);
        table.segment_begin = add("segment_begin", table.segment_begin, experts + 1);
        table.counts = add("counts", table.counts, experts);
        if (layer_.lose_pulls) table.num_pulls = 0;
        schedule::PullUnits units = host.units();
        const int64_t num_rows = units.row_begin[units.num_units];
        units.units = add("units", units.units, units.num_units);
        units.row_begin = add("unit_rows_begin", units.row_begin, units.num_units + 1);
        units.rows = add("unit_rows", units.rows, num_rows);
        std::vector<schedule::RankInputs> inputs;
        for (size_t r = 0; r < ranks_.size(); ++r) {
            inputs.push_back({x_[r], nullptr, layer_.hidden * kElementBytes, 0, ranks_[r].x.shape(0)});
        }
        schedule::PreparedCall call{};
        call.expired = limits.expired;
        call.table = add("table", &table, 1);
        call.units = add("pull_units", &units, 1);
        call.ranks = add("rank_inputs", inputs.data(), static_cast<int64_t>(inputs.size()));
        call.row_peer = add("row_peer", host.plan().row_peer.data(), host.plan().num_rows());
        call.row_slot = add("row_slot", host.plan().row_slot.data(), host.plan().num_rows());
        const py::array_t<uint32_t> zeros(2, std::vector<uint32_t>{0, 0}.data());
        call.task_claim = static_cast<uint32_t*>(session_.add("claims", zeros, Use{}, rank));
        call.pull_claim = call.task_claim + 1;
        const int64_t num_counters =
            schedule::counter_layout(host.shape(), host.table()).begin[schedule::kNumCounters];
        const std::vector<uint32_t> unset(static_cast<size_t>(num_counters));
        counters_.emplace_back(num_counters, unset.data());
        call.counters = static_cast<uint32_t*>(session_.add("counters", counters_.back(), kOutput, rank));
        return call;
    }

    bool has_ended() const {
        return std::any_of(ranks_.begin(), ranks_.end(), [](const RankArgument& rank) {
            return *static_cast<const uint32_t*>(rank.limits->data()) != 0;
        });
    }

    /// Every counter of the pass has the value that the schedule says.
    void check_counters(size_t rank) const {
        using schedule::Counter;
        const schedule::ScheduleShape& shape = schedules_[rank]->shape();
        const schedule::Table& table = schedules_[rank]->table();
        for (const Counter counter : {Counter::kX, Counter::kGateUp, Counter::kHiddenRead}) {
            if (layer_.recompute && counter == Counter::kHiddenRead) continue;
            const int64_t begin = schedule::block_counter_begin(shape, table, counter);
            for (int64_t i = 0; i < schedule::counter_size(shape, table, counter); ++i) {
                const int64_t wanted = schedule::final_value(shape, table, counter, static_cast<int32_t>(i));
                const int64_t found = counters_[rank].at(begin + i);
                if (found != wanted) {
                    throw EmulatorError(concat("rank ", rank, ": counter ", static_cast<int32_t>(counter),
                                               " of row block ", i, " ends with ", found, ", not ", wanted));
                }
            }
        }
    }

    launch::MoeExpertViews experts(int rank, int set) {
        const RankArgument& argument = ranks_[rank];
        const std::string prefix = set == 0 ? "" : "shared ";
        launch::MoeExpertViews views;
        views.gate = weight_view(session_, prefix + "w_gate", argument.weights[set][0], rank);
        views.up = weight_view(session_, prefix + "w_up", argument.weights[set][1], rank);
        views.down = weight_view(session_, prefix + "w_down", argument.weights[set][2], rank);
        const auto bias = [&](const char* name, const std::optional<py::array>& array) {
            if (!array) return launch::BiasView{};
            return launch::BiasView{session_.add(prefix + name, *array, kInput, rank),
                                    array->shape(1) * kElementBytes};
        };
        views.b_gate = bias("b_gate", argument.biases[set].gate);
        views.b_up = bias("b_up", argument.biases[set].up);
        views.b_down = bias("b_down", argument.biases[set].down);
        return views;
    }

    void add_launch(int rank) {
        const RankArgument& argument = ranks_[rank];
        const auto output = [&](const char* name, const std::optional<py::array>& array) -> void* {
            return array ? session_.add(name, *array, kOutput, rank) : nullptr;
        };
        const auto scratch = [&](const char* name, int64_t rows, int64_t columns) -> void* {
            return rows * columns == 0
                       ? nullptr
                       : session_.scratch(name, static_cast<size_t>(rows * columns * kElementBytes), rank);
        };
        launch::MoeForward forward{};
        forward.limits = limits_in(session_, argument.limits.value(), rank);
        forward.shape = schedules_[rank]->shape();
        forward.call = prepared(rank, forward.limits);
        forward.routed = experts(rank, 0);
        forward.shared = experts(rank, 1);
        const int64_t tokens = argument.x.shape(0);
        forward.x = x_[rank];
        forward.x_stride = layer_.hidden * kElementBytes;
        forward.ring_x = scratch("ring_x", layer_.ring_rows, layer_.hidden);
        forward.ring_hidden = scratch("ring_hidden", layer_.ring_rows, layer_.intermediate);
        forward.shared_hidden = scratch("shared_hidden", tokens, layer_.shared_intermediate);
        forward.home_rows = windows_[rank];
        if (windows_.size() > 1) {
            forward.window_stride = static_cast<char*>(windows_[1]) - static_cast<char*>(windows_[0]);
        }
        forward.shared_rows = output("shared_rows", argument.shared_rows);
        forward.saved_x = output("saved_x", argument.saved_x);
        forward.saved_gate = output("saved_gate", argument.saved_gate);
        forward.saved_up = output("saved_up", argument.saved_up);
        forward.saved_shared_gate = output("saved_shared_gate", argument.saved_shared_gate);
        forward.saved_shared_up = output("saved_shared_up", argument.saved_shared_up);
        if (argument.saved_gate) forward.save_rows = argument.saved_gate->shape(0);
        forward.activation = layer_.activation;
        forward.limit = layer_.limit;
        forward.rank = rank;
        if (argument.spans) {
            forward.spans.tasks = static_cast<TaskSpan*>(output("spans", argument.spans));
            forward.spans.num_tasks = argument.spans->shape(0);
        }
        launch::launch_sm90_bf16_moe_forward(forward, &session_.stream(rank));
    }

    LayerArgument layer_;
    std::vector<RankArgument> ranks_;
    Session session_;
    std::vector<std::unique_ptr<schedule::HostSchedule>> schedules_;
    std::vector<void*> windows_;
    std::vector<const char*> x_;
    std::vector<py::array_t<uint32_t>> counters_;
    std::vector<PeerGroup> groups_;
};

emu::RunResult moe_forward(const LayerArgument& layer, const std::vector<RankArgument>& ranks,
                           const emu::RunOptions& options) {
    return ForwardRun(layer, ranks).run(options);
}

}  // namespace

void bind_moe_forward(py::module_& module) {
    py::class_<WeightArgument>(module, "Weights", "Rows first, first + step, ... of uint16 [E, R, K].")
        .def(py::init([](const py::array& array, int64_t first, int64_t step, int64_t rows) {
                 return WeightArgument{array, first, step, rows};
             }),
             py::arg("array"), py::arg("first"), py::arg("step"), py::arg("rows"));
    module.def("grouped_gemm", &grouped_gemm, py::arg("x"), py::arg("weights"), py::arg("segment_begin"),
               py::arg("counts"), py::arg("y"), py::arg("options"));
    py::class_<LayerArgument>(module, "Layer")
        .def(py::init<>())
        .def_readwrite("num_experts", &LayerArgument::num_experts)
        .def_readwrite("top_k", &LayerArgument::top_k)
        .def_readwrite("max_tokens", &LayerArgument::max_tokens)
        .def_readwrite("hidden", &LayerArgument::hidden)
        .def_readwrite("intermediate", &LayerArgument::intermediate)
        .def_readwrite("shared_intermediate", &LayerArgument::shared_intermediate)
        .def_readwrite("ring_rows", &LayerArgument::ring_rows)
        .def_readwrite("save", &LayerArgument::save)
        .def_readwrite("activation", &LayerArgument::activation)
        .def_readwrite("num_blocks", &LayerArgument::num_blocks)
        .def_readwrite("limit", &LayerArgument::limit)
        .def_readwrite("recompute", &LayerArgument::recompute)
        .def_readwrite("lose_pulls", &LayerArgument::lose_pulls);
    py::class_<RankArgument> rank(module, "Rank");
    rank.def(py::init<>())
        .def_readwrite("x", &RankArgument::x)
        .def_readwrite("ids", &RankArgument::ids)
        .def_readwrite("home_rows", &RankArgument::home_rows)
        .def_readwrite("shared_rows", &RankArgument::shared_rows)
        .def_readwrite("saved_x", &RankArgument::saved_x)
        .def_readwrite("saved_gate", &RankArgument::saved_gate)
        .def_readwrite("saved_up", &RankArgument::saved_up)
        .def_readwrite("saved_shared_gate", &RankArgument::saved_shared_gate)
        .def_readwrite("saved_shared_up", &RankArgument::saved_shared_up)
        .def_readwrite("spans", &RankArgument::spans)
        .def_readwrite("limits", &RankArgument::limits)
        .def("set_weights",
             [](RankArgument& self, bool shared, const WeightArgument& gate, const WeightArgument& up,
                const WeightArgument& down) {
                 self.weights[shared][0] = gate;
                 self.weights[shared][1] = up;
                 self.weights[shared][2] = down;
             })
        .def("set_biases", [](RankArgument& self, const std::optional<py::array>& gate,
                              const std::optional<py::array>& up, const std::optional<py::array>& down) {
            self.biases[0] = BiasArgument{gate, up, down};
        });
    module.attr("SPAN_BYTES") = sizeof(TaskSpan);
    module.def("moe_forward", &moe_forward, py::arg("layer"), py::arg("ranks"), py::arg("options"));
}

}  // namespace mok::emulator
