// Publishing and preparation of calls on emulated ranks.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <string>
#include <vector>

#include "csrc/bindings/emulator/session.h"
#include "csrc/bindings/prepared_arrays.h"
#include "csrc/bindings/schedule_settings.h"
#include "csrc/launch/peer_barrier.h"
#include "csrc/launch/prepare.h"
#include "csrc/layout/window.h"

namespace py = pybind11;

namespace mok::emulator {

namespace {

using IdArray = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

/// What one rank brings to a call.
struct RankCall {
    IdArray ids;                                                        // [T, K]
    py::array_t<int16_t, py::array::c_style | py::array::forcecast> x;  // [T, H]
};

struct PreparationArgument {
    py::dict settings;  // mok.simulation.schedule_settings
    int64_t max_tokens;
    int32_t calls;         // one after the other, all alike
    uint32_t most_blocks;  // of a kernel
    uint32_t warps;        // of a block of the preparation
    bool may_be_small;     // Preparation's
    bool x_in_heap;        // nothing to stage
    int32_t ended_rank;    // whose workspace has ended before; -1: nobody's
};

class PreparationRun {
  public:
    PreparationRun(const PreparationArgument& argument, const std::vector<RankCall>& ranks)
        : argument_(argument), ranks_(ranks), num_ranks_(static_cast<int>(ranks.size())) {
        top_k_ = static_cast<int32_t>(ranks_.at(0).ids.shape(1));
        const int64_t hidden = argument_.settings["hidden"].cast<int64_t>();
        layout_ = window_layout(control_block_bytes(num_ranks_), argument_.max_tokens, top_k_, hidden,
                                DType::kBFloat16);
        add_windows();
        for (int rank = 0; rank < num_ranks_; ++rank) add_rank(rank);
    }

    py::list run(emu::RunOptions options) {
        if (argument_.ended_rank >= 0) options.ended.rank = argument_.ended_rank;
        session_.run(options);
        py::list results;
        if (argument_.ended_rank >= 0) {  // nothing was prepared
            results.append(published(argument_.ended_rank));
            return results;
        }
        for (int rank = 0; rank < num_ranks_; ++rank) results.append(result(rank));
        return results;
    }

  private:
    /// As SymmHeap makes them, long before any launch and known to all ranks: the control block is zero but
    /// for the barriers' time limit.
    void add_windows() {
        std::vector<py::array> windows;
        for (int rank = 0; rank < num_ranks_; ++rank) {
            py::array_t<uint8_t> window(static_cast<py::ssize_t>(layout_.bytes));
            std::memset(window.mutable_data(), 0xff, static_cast<size_t>(layout_.bytes));
            std::memset(window.mutable_data(), 0, static_cast<size_t>(control_block_bytes(num_ranks_)));
            DeviceState& state = control_head(reinterpret_cast<char*>(window.mutable_data()))->device;
            state.limit_ns = kLimitNs;
            state.expired = state.ended = rank == argument_.ended_rank ? 1 : 0;
            const auto& x = ranks_[static_cast<size_t>(rank)].x;
            if (argument_.x_in_heap) {
                std::memcpy(window.mutable_data() + layout_.x, x.data(), static_cast<size_t>(x.nbytes()));
            }
            windows.push_back(window);
        }
        windows_ = session_.add_windows("window", windows, Use{false, false, true, /* is_input */ false});
    }

    launch::Preparation preparation(int rank) const {
        launch::Preparation result{};
        result.plan =
            PlanShape{rank,   num_ranks_,           argument_.settings["num_experts"].cast<int32_t>(),
                      top_k_, argument_.max_tokens, argument_.settings["pad"].cast<int64_t>()};
        schedule::ScheduleSizes sizes = bindings::schedule_sizes(argument_.settings);
        sizes.num_local_experts = result.plan.num_local_experts();
        sizes.num_tokens = ranks_[static_cast<size_t>(rank)].ids.shape(0);
        const schedule::KernelConfig config = bindings::kernel_config(argument_.settings);
        schedule::check_schedule(result.plan, sizes, config);
        result.shape = schedule::make_schedule_shape(sizes, config);
        result.most_blocks = argument_.most_blocks;
        result.warps = argument_.warps;
        result.may_be_small = argument_.may_be_small;
        return result;
    }

    void add_rank(int rank) {
        const RankCall& own = ranks_[static_cast<size_t>(rank)];
        const launch::Preparation preparation = this->preparation(rank);
        const int64_t row_bytes = preparation.shape.sizes.row_bytes;
        char* window = static_cast<char*>(windows_[static_cast<size_t>(rank)]);
        auto* record = static_cast<PeerRecord*>(session_.zeros("peer record", sizeof(PeerRecord), rank));
        launch::PreparationInputs inputs{};
        inputs.header.num_tokens = own.ids.shape(0);
        inputs.header.x_offset = layout_.x;
        inputs.header.top_k = top_k_;
        inputs.topk_ids = session_.add("topk_ids", own.ids, kInput, rank);
        inputs.ids_are_int64 = true;
        inputs.x = {session_.add("x", own.x, kInput, rank), row_bytes};
        const int64_t stride =
            num_ranks_ > 1 ? static_cast<char*>(windows_[1]) - static_cast<char*>(windows_[0]) : 0;
        inputs.group = {window, stride, record, rank, num_ranks_};
        inputs.ids_offset = layout_.ids;
        inputs.limits = {kLimitNs, &control_head(window)->device.expired, &record->wait, rank};
        session_.set_end_word(rank, inputs.limits.expired);
        const bool stages = inputs.header.num_tokens > 0 && !argument_.x_in_heap;
        const launch::StagedRows x{stages ? inputs.x.data : nullptr, row_bytes, row_bytes, layout_.x};
        void* scratch = session_.scratch("preparation",
                                         static_cast<size_t>(launch::preparation_bytes(preparation)), rank);
        launch::EmulatorStream& stream = session_.stream(rank);
        for (int32_t call = 0; call < argument_.calls; ++call) {
            prepared_.push_back(
                num_ranks_ > 1
                    ? launch::launch_publish_and_prepare(preparation, inputs, x, {}, scratch, &stream)
                    : launch::launch_prepare(preparation, inputs, scratch, &stream));
            if (num_ranks_ > 1) launch::launch_peer_barrier(inputs.group, PeerPhase::kOutputs, &stream);
        }
    }

    /// What peers read of a rank's window.
    py::dict published(int rank) const {
        char* window = static_cast<char*>(windows_[static_cast<size_t>(rank)]);
        const RankCall& own = ranks_[static_cast<size_t>(rank)];
        py::dict result;
        result["header"] =
            bindings::to_array(reinterpret_cast<const int64_t*>(control_head(window)->header), kHeaderWords);
        result["ids"] =
            bindings::to_array(reinterpret_cast<const int32_t*>(window + layout_.ids), own.ids.size());
        result["x"] = bindings::to_array(reinterpret_cast<const int16_t*>(window + layout_.x), own.x.size());
        return result;
    }

    py::dict result(int rank) const {
        const launch::Preparation preparation = this->preparation(rank);
        const schedule::PreparedCall& call = prepared_[static_cast<size_t>((rank + 1) * argument_.calls - 1)];
        const int32_t experts = preparation.plan.num_local_experts();
        const schedule::Table& table = *call.table;
        py::dict result = bindings::prepared_arrays({&preparation.shape, &table, *call.units, call.row_peer,
                                                     call.row_slot, experts, table.segment_begin[experts]});
        result["ids"] = bindings::to_array(call.ids, ranks_[static_cast<size_t>(rank)].ids.size());
        result["counters"] = bindings::to_array(
            call.counters, schedule::counter_layout(preparation.shape, table).begin[schedule::kNumCounters]);
        const uint32_t claims[] = {*call.task_claim, *call.pull_claim};
        result["claims"] = bindings::to_array(claims, 2);
        py::list inputs;  // x of each rank, as this one reaches it
        for (int source = 0; source < num_ranks_; ++source) {
            const schedule::RankInputs& from = call.ranks[source];
            const int64_t hidden = preparation.shape.sizes.hidden;
            py::array_t<int16_t> rows({from.num_tokens, hidden});
            for (int64_t token = 0; token < from.num_tokens; ++token) {
                std::memcpy(rows.mutable_data(token, 0), from.x + token * from.x_stride,
                            static_cast<size_t>(hidden * 2));
            }
            inputs.append(rows);
        }
        result["inputs"] = inputs;
        return result;
    }

    static constexpr uint64_t kLimitNs = 1'000'000'000;  // no schedule reaches it

    PreparationArgument argument_;
    std::vector<RankCall> ranks_;
    int num_ranks_;
    int32_t top_k_;
    WindowLayout layout_;
    Session session_;
    std::vector<void*> windows_;
    std::vector<schedule::PreparedCall> prepared_;
};

py::list prepare(const py::dict& settings, int64_t max_tokens, const std::vector<IdArray>& ids,
                 const std::vector<py::array>& x, int32_t calls, uint32_t most_blocks, uint32_t warps,
                 const emu::RunOptions& options, bool may_be_small, bool x_in_heap, int32_t ended_rank) {
    std::vector<RankCall> ranks;
    for (size_t rank = 0; rank < ids.size(); ++rank) ranks.push_back({ids[rank], x.at(rank)});
    const PreparationArgument argument{settings, max_tokens,   calls,     most_blocks,
                                       warps,    may_be_small, x_in_heap, ended_rank};
    return PreparationRun(argument, ranks).run(options);
}

}  // namespace

void bind_preparation(py::module_& module) {
    module.def(
        "prepare", &prepare, py::arg("settings"), py::arg("max_tokens"), py::arg("ids"), py::arg("x"),
        py::arg("calls"), py::arg("most_blocks"), py::arg("warps"), py::arg("options"),
        py::arg("may_be_small") = true, py::arg("x_in_heap") = false, py::arg("ended_rank") = -1,
        "Each rank's prepared call as arrays, and the rows of x as it reaches those of all ranks; where "
        "a rank has ended before: what its window shows its peers instead.");
}

}  // namespace mok::emulator
