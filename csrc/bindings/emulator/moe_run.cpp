#include "csrc/bindings/emulator/moe_run.h"

#include <cstring>
#include <tuple>

#include "csrc/bindings/emulator/block_names.h"
#include "csrc/launch/peer_barrier.h"
#include "csrc/layout/check.h"

namespace py = pybind11;

namespace mok::emulator {

namespace {

constexpr uint64_t kLimitNs = 1'000'000'000'000;  // virtual time; waits expire where a run asks for it

}  // namespace

launch::WeightView weight_view(Session& session, const std::string& name, const py::object& argument,
                               int rank) {
    const auto [array, first, step, rows] = argument.cast<std::tuple<py::array, int64_t, int64_t, int64_t>>();
    MOK_CHECK(array.ndim() == 3 && array.itemsize() == kBfloat16Bytes, name, " must be uint16 [E, rows, K].");
    const int64_t line = array.shape(2) * kBfloat16Bytes;
    launch::WeightView view;
    view.experts = array.shape(0);
    view.rows = rows;
    view.columns = array.shape(2);
    view.expert_stride = array.shape(1) * line;
    view.row_stride = step * line;
    view.data = static_cast<char*>(session.add(name, array, kInput, rank)) + first * line;
    return view;
}

MoeRun::MoeRun(const py::dict& layer, const std::vector<py::dict>& ranks, schedule::Pass pass,
               const std::vector<HomeArray>& home_arrays)
    : layer_(layer), ranks_(ranks), num_ranks_(static_cast<int>(ranks.size())) {
    for (int rank = 0; rank < num_ranks_; ++rank) add_schedule(rank, pass);
    add_windows(home_arrays);
    for (int rank = 0; rank < num_ranks_; ++rank) {
        inputs_.push_back({input(rank, "x"), input(rank, "dout"), row_bytes(), row_bytes(), tokens(rank)});
    }
}

emu::RunResult MoeRun::run(const emu::RunOptions& options) {
    for (int rank = 0; rank < num_ranks_; ++rank) {
        void* stream = &session_.stream(rank);
        name_gemm_block(session_.stream(rank));
        launch::launch_peer_barrier(groups_[rank], PeerPhase::kInputs, stream);
        add_launch(rank);
        launch::launch_peer_barrier(groups_[rank], PeerPhase::kOutputs, stream);
    }
    emu::RunResult result = session_.run(options);
    for (int rank = 0; rank < num_ranks_ && result.trapped.empty(); ++rank) {
        if (!has_ended(rank)) check_counters(rank);
    }
    return result;
}

void MoeRun::add_schedule(int rank, schedule::Pass pass) {
    const PlanShape plan_shape{rank,
                               num_ranks_,
                               static_cast<int32_t>(size("num_experts")),
                               static_cast<int32_t>(size("top_k")),
                               size("max_tokens"),
                               kDefaultPad};
    schedule::ScheduleSizes sizes{};
    sizes.pass = pass;
    sizes.save = static_cast<schedule::Save>(size("save"));
    sizes.hidden = size("hidden");
    sizes.intermediate = size("intermediate");
    sizes.shared_intermediate = size("shared_intermediate");
    sizes.num_tokens = tokens(rank);
    sizes.num_local_experts = plan_shape.num_local_experts();
    sizes.ring_rows = size("ring_rows");
    if (pass == schedule::Pass::kBackward) {
        sizes.gradients = size("gradients");
        sizes.zero_idle = !flag("accumulate");
    }
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

void MoeRun::add_windows(const std::vector<HomeArray>& home_arrays) {
    py::array_t<uint8_t> control(static_cast<py::ssize_t>(control_block_bytes(num_ranks_)));
    std::memset(control.mutable_data(), 0, static_cast<size_t>(control.nbytes()));
    control_head(reinterpret_cast<char*>(control.mutable_data()))->device.limit_ns = kLimitNs;
    // Peers touch the control block before this rank's first kernel.
    std::vector<WindowArray> contents{
        {"control", std::vector<py::array>(ranks_.size(), control), Use{false, false, true, false}}};
    for (const HomeArray& each : home_arrays) {
        WindowArray& array = contents.emplace_back();
        array.name = each.name;
        array.use = each.is_output ? kPeerOutput : kPeerInput;
        for (const py::dict& rank : ranks_) array.of_rank.push_back(rank[each.name].cast<py::array>());
    }
    const std::vector<std::vector<void*>> memory = session_.add_windows(contents);
    for (size_t i = 1; i < contents.size(); ++i) homes_.emplace_back(contents[i].name, memory[i]);
    char* const first = static_cast<char*>(memory[0][0]);
    if (num_ranks_ > 1) stride_ = static_cast<char*>(memory[0][1]) - first;
    for (int rank = 0; rank < num_ranks_; ++rank) {
        auto* record = static_cast<PeerRecord*>(session_.zeros("record", sizeof(PeerRecord), rank));
        groups_.push_back({first + rank * stride_, stride_, record, rank, num_ranks_});
    }
}

char* MoeRun::home(int rank, const std::string& name) const {
    for (const auto& [each, memory] : homes_) {
        if (each == name) return static_cast<char*>(memory[rank]);
    }
    throw std::logic_error(concat(name, " lies in no window"));
}

int64_t MoeRun::save_rows(int rank) const {
    return has(rank, "saved_gate") ? ranks_[rank]["saved_gate"].cast<py::array>().shape(0) : 0;
}

char* MoeRun::input(int rank, const std::string& name) {
    if (!has(rank, name)) return nullptr;
    const bool is_pulled = name == "x" || name == "dout";
    return static_cast<char*>(session_.add(name, ranks_[rank][name.c_str()].cast<py::array>(),
                                           is_pulled ? kPeerInput : kInput, rank));
}

void* MoeRun::output(int rank, const std::string& name) {
    if (!has(rank, name)) return nullptr;
    return session_.add(name, ranks_[rank][name.c_str()].cast<py::array>(), kOutput, rank);
}

launch::BiasView MoeRun::bias(int rank, const std::string& name) {
    if (!has(rank, name)) return {};
    return {input(rank, name), ranks_[rank][name.c_str()].cast<py::array>().shape(1) * kBfloat16Bytes};
}

launch::MoeExpertViews MoeRun::experts(int rank, const std::string& prefix) {
    const auto weights = [&](const char* matrix) {
        const std::string name = prefix + matrix;
        if (!has(rank, name)) return launch::WeightView{};
        return weight_view(session_, name, ranks_[rank][name.c_str()], rank);
    };
    return {weights("w_gate"),           weights("w_up"),
            weights("w_down"),           bias(rank, prefix + "b_gate"),
            bias(rank, prefix + "b_up"), bias(rank, prefix + "b_down")};
}

template <typename T>
const T* MoeRun::values(int rank, const char* name, const T* data, int64_t count) {
    if (count == 0) return nullptr;
    const py::array_t<uint8_t> bytes(static_cast<py::ssize_t>(count * sizeof(T)),
                                     reinterpret_cast<const uint8_t*>(data));
    return static_cast<const T*>(session_.add(name, bytes, kInput, rank));
}

/// As csrc/kernels/prepare.cuh leaves a call, from the host's schedule.
schedule::PreparedCall MoeRun::prepared(int rank, const ptx::WaitLimits& limits) {
    const schedule::HostSchedule& host = *schedules_[rank];
    schedule::Table table = host.table();
    const auto move = [&](const char* name, auto*& data, int64_t count) {
        data = const_cast<std::remove_reference_t<decltype(data)>>(values(rank, name, data, count));
    };
    if (flag("lose_pulls")) table.num_pulls = 0;
    const int64_t experts = host.shape().sizes.num_local_experts;
    move("chunks", table.chunks, table.num_chunks + 1);
    move("pieces", table.pieces, table.num_pieces + 1);
    move("runs", table.runs, table.num_runs + 1);
    move("unit_begin", table.unit_begin, table.num_pieces + 1);
    move("reused_piece", table.reused_piece, table.num_reused(host.shape()));
    move("idle_experts", table.idle_experts, table.num_idle);
    move("segment_begin", table.segment_begin, experts + 1);
    move("counts", table.counts, experts);
    schedule::PullUnits units = host.units();
    const int64_t num_rows = units.row_begin[units.num_units];
    move("units", units.units, units.num_units);
    move("unit_rows_begin", units.row_begin, units.num_units + 1);
    move("unit_rows", units.rows, num_rows);
    schedule::PreparedCall call{};
    call.expired = limits.expired;
    call.table = values(rank, "table", &table, 1);
    call.units = values(rank, "pull_units", &units, 1);
    call.ranks = values(rank, "rank_inputs", inputs_.data(), num_ranks_);
    call.row_peer = values(rank, "row_peer", host.plan().row_peer.data(), host.plan().num_rows());
    call.row_slot = values(rank, "row_slot", host.plan().row_slot.data(), host.plan().num_rows());
    call.task_claim = static_cast<uint32_t*>(session_.zeros("task claim", 4, rank));
    call.pull_claim = static_cast<uint32_t*>(session_.zeros("pull claim", 4, rank));
    py::array_t<uint32_t> counters(
        schedule::counter_layout(host.shape(), host.table()).begin[schedule::kNumCounters]);
    std::memset(counters.mutable_data(), 0, static_cast<size_t>(counters.nbytes()));
    counters_.push_back(counters);
    call.counters = static_cast<uint32_t*>(session_.add("counters", counters, kOutput, rank));
    return call;
}

/// uint32 [80] of a rank: the word `expired`, and a WaitRecord from byte 256 on.
ptx::WaitLimits MoeRun::limits(int rank) {
    constexpr size_t kRecordAt = 256;
    if (!has(rank, "limits")) return session_.limits(rank);
    char* memory = static_cast<char*>(output(rank, "limits"));
    session_.set_end_word(rank, reinterpret_cast<uint32_t*>(memory));
    return {kLimitNs, reinterpret_cast<uint32_t*>(memory),
            reinterpret_cast<ptx::WaitRecord*>(memory + kRecordAt), rank};
}

bool MoeRun::has_ended(int rank) const {
    return has(rank, "limits") && ranks_[rank]["limits"].cast<py::array_t<uint32_t>>().at(0) != 0;
}

void MoeRun::check_counters(int rank) const {
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
            throw EmulatorError(
                concat("rank ", rank, ": counter ", c, " [", index, "] ends with ", found, ", not ", wanted));
        }
    }
}

}  // namespace mok::emulator
