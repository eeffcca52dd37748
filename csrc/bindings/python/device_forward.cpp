// mok._C: the forward pass of one rank on a GPU, stage by stage, for tests and benchmarks of its kernels.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "csrc/bindings/python/device_arguments.h"
#include "csrc/symm/workspace.h"
#if defined(MOK_WITH_SM90)
#include "csrc/bindings/python/held_call.h"
#include "csrc/launch/device_call.h"
#include "csrc/launch/sm90_bf16_moe_forward.h"
#include "csrc/launch/weighted_sum.h"
#endif

namespace py = pybind11;

namespace mok::python {

#if defined(MOK_WITH_SM90)

namespace {

enum Stage : int64_t { kPrepare = 1, kKernel = 2, kMeet = 4, kSum = 8 };

class DeviceForward {
  public:
    DeviceForward(std::shared_ptr<Workspace> workspace, const py::dict& settings, int32_t top_k,
                  int64_t max_tokens)
        : held_(std::move(workspace), settings, top_k, max_tokens) {}

    void launch(const py::dict& tensors, int64_t stages, uintptr_t stream) {
        const Arguments arguments(tensors);
        held_.set_tokens(arguments.integer("num_tokens"));
        launch::DeviceCall call(held_.workspace(), reinterpret_cast<void*>(stream));
        if ((stages & kPrepare) != 0) prepare(call, arguments);
        if ((stages & kKernel) != 0) run_kernel(call, arguments);
        if ((stages & kMeet) != 0) call.meet_outputs();
        if ((stages & kSum) != 0) sum(call, arguments);
    }

  private:
    void prepare(launch::DeviceCall& call, const Arguments& arguments) {
        const CallHeader header = held_.header();
        const launch::CallTensors inputs{arguments.address("topk_ids"),
                                         arguments.integer("ids_are_int64") != 0,
                                         {arguments.address("x"), arguments.integer("x_stride")},
                                         {}};
        char* memory = call.scratch(call.preparation_memory(held_.preparation(), header, inputs));
        prepared_ = call.prepare(held_.preparation(), header, inputs, memory);
    }

    /// Several ranks: in the window; one: wherever the caller has them.
    void* home_rows(const launch::DeviceCall& call, const Arguments& arguments) const {
        if (held_.workspace().num_ranks() == 1) return arguments.address("home_rows");
        return call.group().window + held_.workspace().layout.rows;
    }

    void run_kernel(launch::DeviceCall& call, const Arguments& arguments) const {
        const schedule::ScheduleSizes& sizes = held_.sizes();
        const int64_t experts = sizes.num_local_experts, hidden = sizes.hidden, inner = sizes.intermediate,
                      shared = sizes.shared_intermediate;
        launch::MoeForward forward{};
        forward.shape = held_.preparation().shape;
        forward.call = prepared_;
        forward.routed.gate = arguments.weights("w_gate", experts, inner, hidden);
        forward.routed.up = arguments.weights("w_up", experts, inner, hidden);
        forward.routed.down = arguments.weights("w_down", experts, hidden, inner);
        forward.routed.b_gate = arguments.bias("b_gate");
        forward.routed.b_up = arguments.bias("b_up");
        forward.routed.b_down = arguments.bias("b_down");
        forward.shared.gate = arguments.weights("shared_gate", 1, shared, hidden);
        forward.shared.up = arguments.weights("shared_up", 1, shared, hidden);
        forward.shared.down = arguments.weights("shared_down", 1, hidden, shared);
        forward.x = arguments.address("x");
        forward.x_stride = arguments.integer("x_stride");
        forward.ring_x = arguments.address("ring_x");
        forward.ring_hidden = arguments.address("ring_hidden");
        forward.shared_hidden = arguments.address("shared_hidden");
        forward.shared_rows = arguments.address("shared_rows");
        forward.home_rows = home_rows(call, arguments);
        forward.window_stride = call.group().stride;
        forward.saved_x = arguments.address("saved_x");
        forward.saved_gate = arguments.address("saved_gate");
        forward.saved_up = arguments.address("saved_up");
        forward.save_rows = arguments.integer("save_rows");
        forward.saved_shared_gate = arguments.address("saved_shared_gate");
        forward.saved_shared_up = arguments.address("saved_shared_up");
        forward.activation = static_cast<int32_t>(arguments.integer("activation"));
        forward.limit = static_cast<float>(arguments.integer("limit_millis")) * 1e-3f;
        forward.rank = held_.workspace().rank();
        forward.limits = call.limits();
        forward.spans.tasks = static_cast<TaskSpan*>(arguments.address("task_spans"));
        forward.spans.num_tasks = arguments.integer("num_task_spans");
        forward.spans.pulls = static_cast<TaskSpan*>(arguments.address("pull_spans"));
        forward.spans.num_pulls = arguments.integer("num_pull_spans");
        launch::launch_sm90_bf16_moe_forward(forward, call.stream());
    }

    void sum(const launch::DeviceCall& call, const Arguments& arguments) const {
        launch::WeightedSum sum{};
        sum.dtype = DType::kBFloat16;
        sum.tokens = held_.sizes().num_tokens;
        sum.top_k = held_.preparation().plan.top_k;
        sum.hidden = held_.sizes().hidden;
        sum.rows = home_rows(call, arguments);
        sum.shared_rows = arguments.address("shared_rows");
        sum.ids = prepared_.ids;
        sum.weights = static_cast<const float*>(arguments.address("topk_weights"));
        sum.out = arguments.address("out");
        sum.rows_stride = sum.shared_stride = sum.out_stride = held_.sizes().row_bytes;
        sum.expired = prepared_.expired;
        launch::launch_weighted_sum(sum, call.stream());
    }

    HeldCall held_;
    schedule::PreparedCall prepared_{};
};

}  // namespace

void bind_device_forward(py::module_& module) {
    py::class_<DeviceForward>(module, "DeviceForward",
                              "The sm_90a forward pass of one rank over memory that the caller holds.")
        .def(py::init<std::shared_ptr<Workspace>, const py::dict&, int32_t, int64_t>(), py::arg("workspace"),
             py::arg("settings"), py::arg("top_k"), py::arg("max_tokens"))
        .def("launch", &DeviceForward::launch, py::arg("tensors"), py::arg("stages"), py::arg("stream"),
             "Stages: 1 preparation, 2 the megakernel, 4 the barrier behind it, 8 the weighted sum.");
}

#else

void bind_device_forward(py::module_&) {}

#endif  // MOK_WITH_SM90

}  // namespace mok::python
