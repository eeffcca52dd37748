// mok._C: the preparation of a call on a GPU by itself, and workspaces of virtual ranks, for tests and
// benchmarks.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "csrc/bindings/prepared_arrays.h"
#include "csrc/layout/check.h"
#include "csrc/symm/registry.h"
#include "csrc/symm/workspace.h"
#if defined(MOK_WITH_CUDA)
#include "csrc/bindings/python/held_call.h"
#include "csrc/kernels/prepare_params.h"
#include "csrc/launch/device_call.h"
#include "csrc/launch/device_workspace.h"
#endif

namespace py = pybind11;

namespace mok::python {

#if defined(MOK_WITH_CUDA)

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

/// Rows [T, H] at `data`; 0: none.
struct RowsArgument {
    uintptr_t data;
    int64_t stride;  // bytes
};

launch::InputRows input_rows(const RowsArgument& rows) {
    return {reinterpret_cast<const void*>(rows.data), rows.stride};
}

/// Calls of one workspace that consist of their preparation alone.
class HeldPreparation {
  public:
    HeldPreparation(std::shared_ptr<Workspace> workspace, int32_t top_k, int64_t max_tokens,
                    const py::dict& settings, uint32_t most_blocks, bool timed, bool may_be_small)
        : held_(std::move(workspace), settings, top_k, max_tokens) {
        MOK_CHECK(held_.workspace().is_device(), "workspace ", held_.workspace().name, " is not on a GPU.");
        launch::Preparation& preparation = held_.preparation();
        preparation.may_be_small = may_be_small;
        if (most_blocks > 0) preparation.most_blocks = most_blocks;
        if (timed) {
            num_times_ = launch::preparation_stamps(preparation);
            times_ = mapping().allocate(num_times_ * static_cast<int64_t>(sizeof(uint64_t)));
        }
    }

    void launch(uintptr_t topk_ids, bool ids_are_int64, int64_t num_tokens, const RowsArgument& x,
                const RowsArgument& dout, bool meets_outputs, uintptr_t stream) {
        held_.set_tokens(num_tokens);
        const launch::CallTensors tensors{reinterpret_cast<const void*>(topk_ids), ids_are_int64,
                                          input_rows(x), input_rows(dout)};
        launch::DeviceCall call(held_.workspace(), reinterpret_cast<void*>(stream));
        const CallHeader header = held_.header();
        call.check(header);
        char* memory = call.scratch(call.preparation_memory(held_.preparation(), header, tensors));
        prepared_ =
            call.prepare(held_.preparation(), header, tensors, memory, static_cast<uint64_t*>(times_.get()));
        if (meets_outputs) call.meet_outputs();
    }

    /// The second kernel alone: ids and headers of all ranks lie in the windows already.
    void launch_published(int64_t num_tokens, uintptr_t stream) {
        held_.set_tokens(num_tokens);
        launch::DeviceCall call(held_.workspace(), reinterpret_cast<void*>(stream));
        launch::PreparationInputs inputs{};
        inputs.header = held_.header();
        inputs.group = call.group();
        inputs.ids_offset = held_.workspace().layout.ids;
        inputs.limits = call.limits();
        prepared_ = launch::launch_prepare(held_.preparation(), inputs,
                                           call.scratch(launch::preparation_bytes(held_.preparation())),
                                           call.stream(), static_cast<uint64_t*>(times_.get()));
    }

    /// Addresses of a rank's published ids (int32 [T, K]) and header (int64 words), and what the latter holds
    /// for a call with so many tokens.
    py::tuple published(int rank) {
        char* window = held_.workspace().heap->window(rank);
        return py::make_tuple(reinterpret_cast<uintptr_t>(window + held_.workspace().layout.ids),
                              reinterpret_cast<uintptr_t>(control_head(window)->header));
    }
    py::array header(int64_t num_tokens) const {
        CallHeader header = held_.header();
        header.num_tokens = num_tokens;
        return bindings::to_array(reinterpret_cast<const int64_t*>(&header), kHeaderWords);
    }

    /// What the last launch made, once it is done.
    py::dict result() {
        auto table = fetch(prepared_.table, 1)[0];
        auto units = fetch(prepared_.units, 1)[0];
        const int32_t experts = held_.sizes().num_local_experts;
        const auto chunks = take(table.chunks, table.num_chunks + 1);
        const auto pieces = take(table.pieces, table.num_pieces + 1);
        const auto runs = take(table.runs, table.num_runs + 1);
        const auto unit_begin = take(table.unit_begin, table.num_pieces + 1);
        const auto reused = take(table.reused_piece, table.num_reused(held_.preparation().shape));
        const auto idle = take(table.idle_experts, table.num_idle);
        const auto segments = take(table.segment_begin, experts + 1);
        const auto counts = take(table.counts, experts);
        const auto unit_list = take(units.units, units.num_units);
        const auto row_begin = take(units.row_begin, units.num_units + 1);
        const auto rows = take(units.rows, row_begin.back());
        const int64_t num_rows = segments.back();
        const auto row_peer = fetch(prepared_.row_peer, num_rows);
        const auto row_slot = fetch(prepared_.row_slot, num_rows);
        py::dict result = bindings::prepared_arrays(
            {&held_.preparation().shape, &table, units, row_peer.data(), row_slot.data(), experts, num_rows});
        result["ids"] =
            to_numpy(fetch(prepared_.ids, held_.sizes().num_tokens * held_.preparation().plan.top_k));
        const int64_t counters =
            schedule::counter_layout(held_.preparation().shape, table).begin[schedule::kNumCounters];
        result["counters"] = to_numpy(fetch(prepared_.counters, counters));
        const uint32_t claims[] = {fetch(prepared_.task_claim, 1)[0], fetch(prepared_.pull_claim, 1)[0]};
        result["claims"] = bindings::to_array(claims, 2);
        py::list inputs;
        for (const schedule::RankInputs& rank : fetch(prepared_.ranks, held_.workspace().num_ranks())) {
            inputs.append(py::make_tuple(reinterpret_cast<uintptr_t>(rank.x), rank.x_stride,
                                         reinterpret_cast<uintptr_t>(rank.dout), rank.dout_stride,
                                         rank.num_tokens));
        }
        result["inputs"] = inputs;
        return result;
    }

    /// The first `rows` of row_slot, whether or not the last launch wrote them.
    py::array raw_row_slot(int64_t rows) { return to_numpy(fetch(prepared_.row_slot, rows)); }

    /// nanoseconds [blocks, stamps] of the last launch; 0 where a block did not take part.
    py::array times() {
        MOK_CHECK(times_ != nullptr, "times: make the preparation with timed=True.");
        return to_numpy(fetch(static_cast<const uint64_t*>(times_.get()), num_times_))
            .attr("reshape")(-1, kPrepareStamps);
    }
    void clear_times() {
        const std::vector<uint64_t> zeros(static_cast<size_t>(num_times_));
        mapping().copy_in(static_cast<char*>(times_.get()), zeros.data(),
                          num_times_ * static_cast<int64_t>(sizeof(uint64_t)));
    }

  private:
    DeviceMapping& mapping() { return *held_.workspace().heap->device_mapping(); }

    template <typename T>
    std::vector<T> fetch(const T* device, int64_t count) {
        std::vector<T> values(static_cast<size_t>(count));
        if (count > 0) {
            mapping().copy_out(values.data(), reinterpret_cast<const char*>(device),
                               count * static_cast<int64_t>(sizeof(T)));
        }
        return values;
    }
    /// The array on the host; `pointer` then points there.
    template <typename T>
    std::vector<std::remove_const_t<T>> take(T*& pointer, int64_t count) {
        std::vector<std::remove_const_t<T>> values =
            fetch(static_cast<const std::remove_const_t<T>*>(pointer), count);
        pointer = values.data();
        return values;
    }
    template <typename T>
    static py::array to_numpy(const std::vector<T>& values) {
        return bindings::to_array(values.data(), static_cast<int64_t>(values.size()));
    }

    HeldCall held_;
    schedule::PreparedCall prepared_{};
    std::shared_ptr<void> times_;
    int64_t num_times_ = 0;
};

std::vector<std::shared_ptr<Workspace>> virtual_workspaces(const std::string& name, int num_ranks,
                                                           int64_t max_tokens, int64_t hidden, int64_t top_k,
                                                           bool is_bfloat16, int64_t arena_bytes, int device,
                                                           uint32_t multiprocessors) {
    const WorkspaceSpec spec{name,
                             0,
                             num_ranks,
                             max_tokens,
                             hidden,
                             top_k,
                             is_bfloat16 ? DType::kBFloat16 : DType::kFloat32,
                             arena_bytes,
                             device};
    std::vector<std::shared_ptr<Workspace>> workspaces = create_virtual_workspaces(spec, multiprocessors);
    for (const auto& workspace : workspaces) launch::prepare_device_workspace(*workspace);
    return workspaces;
}

}  // namespace

void bind_device_preparation(py::module_& module) {
    py::class_<RowsArgument>(module, "InputRows", "Address and row stride (bytes) of [T, H]; 0: none.")
        .def(py::init([](uintptr_t data, int64_t stride) {
                 return RowsArgument{data, stride};
             }),
             py::arg("data") = 0, py::arg("stride") = 0);
    py::class_<HeldPreparation>(module, "DevicePreparation",
                                "The preparation of calls on a GPU (csrc/launch/device_call.h).")
        .def(py::init<std::shared_ptr<Workspace>, int32_t, int64_t, const py::dict&, uint32_t, bool, bool>(),
             py::arg("workspace"), py::arg("top_k"), py::arg("max_tokens"), py::arg("settings"),
             py::arg("most_blocks") = 0, py::arg("timed") = false, py::arg("may_be_small") = true)
        .def("launch", &HeldPreparation::launch, py::arg("topk_ids"), py::arg("ids_are_int64"),
             py::arg("num_tokens"), py::arg("x"), py::arg("dout"), py::arg("meets_outputs"),
             py::arg("stream"), Unlocked())
        .def("launch_published", &HeldPreparation::launch_published, py::arg("num_tokens"), py::arg("stream"),
             Unlocked())
        .def("published", &HeldPreparation::published, py::arg("rank"))
        .def("header", &HeldPreparation::header, py::arg("num_tokens"))
        .def("result", &HeldPreparation::result)
        .def("raw_row_slot", &HeldPreparation::raw_row_slot, py::arg("rows"))
        .def("times", &HeldPreparation::times)
        .def("clear_times", &HeldPreparation::clear_times);
    module.def(
        "virtual_workspaces", &virtual_workspaces, py::arg("name"), py::arg("num_ranks"),
        py::arg("max_tokens"), py::arg("hidden_size"), py::arg("top_k"), py::arg("is_bfloat16"),
        py::arg("arena_bytes"), py::arg("device"), py::arg("multiprocessors"), Unlocked(),
        "The connected workspaces of so many ranks that this process plays itself on one GPU, each with "
        "a share of its multiprocessors.");
}

#else

void bind_device_preparation(py::module_&) {}

#endif  // MOK_WITH_CUDA

}  // namespace mok::python
