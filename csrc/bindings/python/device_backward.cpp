// mok._C: the backward pass of one rank on a GPU, stage by stage, for benchmarks of its kernel.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "csrc/bindings/python/device_arguments.h"
#include "csrc/layout/check.h"
#include "csrc/symm/workspace.h"
#if defined(MOK_WITH_SM90)
#include "csrc/bindings/python/held_call.h"
#include "csrc/launch/device_call.h"
#include "csrc/launch/sm90_bf16_moe_backward.h"
#endif

namespace py = pybind11;

namespace mok::python {

#if defined(MOK_WITH_SM90)

namespace {

/// One rank without peers: everything lies in memory of the caller.
class DeviceBackward {
  public:
    DeviceBackward(std::shared_ptr<Workspace> workspace, const py::dict& settings, int32_t top_k,
                   int64_t max_tokens)
        : held_(std::move(workspace), settings, top_k, max_tokens) {
        MOK_CHECK(held_.workspace().num_ranks() == 1, "DeviceBackward is for one rank.");
    }

    void launch(const py::dict& tensors, uintptr_t stream) {
        const Arguments arguments(tensors);
        held_.set_tokens(arguments.integer("num_tokens"));
        launch::DeviceCall call(held_.workspace(), reinterpret_cast<void*>(stream));
        launch::MoeBackward backward{};
        backward.shape = held_.preparation().shape;
        backward.call = prepare(call, arguments);
        backward.limits = call.limits();
        set_inputs(arguments, backward);
        set_memory(arguments, backward);
        set_gradients(arguments, backward);
        launch::launch_sm90_bf16_moe_backward(backward, call.stream());
    }

  private:
    schedule::PreparedCall prepare(launch::DeviceCall& call, const Arguments& arguments) {
        const CallHeader header = held_.header();
        const int64_t row_bytes = held_.sizes().row_bytes;
        const launch::CallTensors inputs{arguments.address("topk_ids"),
                                         arguments.integer("ids_are_int64") != 0,
                                         {arguments.address("x"), row_bytes},
                                         {arguments.address("dout"), row_bytes}};
        char* memory = call.scratch(call.preparation_memory(held_.preparation(), header, inputs));
        return call.prepare(held_.preparation(), header, inputs, memory);
    }

    void set_inputs(const Arguments& arguments, launch::MoeBackward& backward) const {
        const schedule::ScheduleSizes& sizes = held_.sizes();
        const int64_t experts = sizes.num_local_experts, hidden = sizes.hidden, inner = sizes.intermediate;
        backward.routed.gate = arguments.weights("w_gate", experts, inner, hidden);
        backward.routed.up = arguments.weights("w_up", experts, inner, hidden);
        backward.routed.down = arguments.weights("w_down", experts, hidden, inner);
        backward.saved_x = arguments.address("saved_x");
        backward.saved_gate = arguments.address("saved_gate");
        backward.saved_up = arguments.address("saved_up");
        backward.save_rows = arguments.integer("save_rows");
        backward.weights = static_cast<const float*>(arguments.address("topk_weights"));
        backward.activation = static_cast<int32_t>(arguments.integer("activation"));
        backward.limit = static_cast<float>(arguments.integer("limit_millis")) * 1e-3f;
    }

    static void set_memory(const Arguments& arguments, launch::MoeBackward& backward) {
        backward.ring_x = arguments.address("ring_x");
        backward.ring_dout = arguments.address("ring_dout");
        backward.ring_gate = arguments.address("ring_gate");
        backward.ring_up = arguments.address("ring_up");
        backward.ring_dgate = arguments.address("ring_dgate");
        backward.ring_dup = arguments.address("ring_dup");
        backward.ring_hidden = arguments.address("ring_hidden");
        backward.ring_partials = static_cast<float*>(arguments.address("ring_partials"));
        backward.accumulators = static_cast<float*>(arguments.address("accumulators"));
        backward.home_rows = arguments.address("home_rows");
        backward.home_weight_grads = static_cast<float*>(arguments.address("weight_grads"));
        backward.spans.tasks = static_cast<TaskSpan*>(arguments.address("task_spans"));
        backward.spans.num_tasks = arguments.integer("num_task_spans");
        backward.spans.pulls = static_cast<TaskSpan*>(arguments.address("pull_spans"));
        backward.spans.num_pulls = arguments.integer("num_pull_spans");
    }

    static void set_gradients(const Arguments& arguments, launch::MoeBackward& backward) {
        const char* names[] = {"dw_gate", "dw_up", "dw_down"};
        for (int m = 0; m < schedule::kNumMatrices; ++m) {
            backward.routed_gradients.weights[m] = arguments.gradient(names[m]);
        }
        backward.accumulate = arguments.integer("accumulate") != 0;
    }

    HeldCall held_;
};

}  // namespace

void bind_device_backward(py::module_& module) {
    py::class_<DeviceBackward>(module, "DeviceBackward",
                               "The sm_90a backward pass of one rank over memory that the caller holds.")
        .def(py::init<std::shared_ptr<Workspace>, const py::dict&, int32_t, int64_t>(), py::arg("workspace"),
             py::arg("settings"), py::arg("top_k"), py::arg("max_tokens"))
        .def("launch", &DeviceBackward::launch, py::arg("tensors"), py::arg("stream"),
             "Preparation and megakernel.");
}

#else

void bind_device_backward(py::module_&) {}

#endif  // MOK_WITH_SM90

}  // namespace mok::python
