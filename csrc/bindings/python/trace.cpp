// mok._C: what mok.trace records.
#include <pybind11/pybind11.h>

#include "csrc/launch/call_trace.h"
#include "csrc/schedule/host_schedule.h"
#include "csrc/schedule/sim_types.h"
#if defined(MOK_WITH_SM90)
#include "csrc/launch/traced_launch.h"
#endif

namespace py = pybind11;

namespace mok::python {

namespace {

py::dict describe(const launch::TracedCall& call) {
    const CallHeader& header = call.header;
    py::dict result;
    result["kind"] = header.kind;
    result["num_tokens"] = header.num_tokens;
    result["hidden"] = header.hidden;
    result["intermediate"] = header.intermediate;
    result["shared_intermediate"] = header.shared_intermediate;
    result["num_experts"] = header.num_experts;
    result["top_k"] = header.top_k;
    result["save"] = header.save;
    result["rank"] = call.rank;
    result["num_ranks"] = call.num_ranks;
    result["num_ctas"] = call.num_ctas;
    result["first"] = call.first;
    result["num_tasks"] = call.num_tasks;
    result["num_pulls"] = call.num_pulls;
    return result;
}

py::tuple end(launch::CallTrace& trace) {
    std::vector<launch::TracedCall> calls;
    launch::Untraced untraced{};
    trace.end(calls, untraced);
    py::list described;
    for (const launch::TracedCall& call : calls) described.append(describe(call));
    py::dict left_out;
    left_out["captured"] = untraced.captured;
    left_out["no_room"] = untraced.no_room;
    left_out["elsewhere"] = untraced.elsewhere;
    return py::make_tuple(described, left_out);
}

/// A forward call as device_forward announces it, without a device: for tests.
bool take(launch::CallTrace& trace, int64_t num_tokens, int64_t num_experts, int64_t top_k, int64_t hidden,
          int64_t intermediate, int32_t num_ranks, int device, bool is_captured) {
    PlanShape plan{0,          num_ranks,  static_cast<int32_t>(num_experts), static_cast<int32_t>(top_k),
                   num_tokens, kDefaultPad};
    check_plan_shape(plan);
    schedule::ScheduleSizes sizes{};
    sizes.hidden = hidden;
    sizes.intermediate = intermediate;
    sizes.num_tokens = num_tokens;
    sizes.num_local_experts = plan.num_local_experts();
    sizes.ring_rows = worst_case_rows(plan);
    sizes.num_sms = 132;
    sizes.row_bytes = 2 * hidden;
    const schedule::KernelConfig& config = *schedule::choose_config(schedule::Arch::kSm90, intermediate);
    launch::TracedCall call{};
    call.header.kind = static_cast<int64_t>(CallKind::kForward);
    call.header.num_tokens = num_tokens;
    call.header.num_experts = num_experts;
    call.header.top_k = top_k;
    call.header.hidden = hidden;
    call.header.intermediate = intermediate;
    call.num_ranks = num_ranks;
    call.num_ctas = sizes.num_sms;
    return trace.take(call, plan, schedule::make_schedule_shape(sizes, config), device, is_captured) !=
           nullptr;
}

}  // namespace

void bind_trace(py::module_& module) {
    using launch::CallTrace;
    py::class_<CallTrace>(module, "CallTrace", "Which calls are traced, and where in the trace's memory.")
        .def(py::init<>())
        .def(
            "begin",
            [](CallTrace& trace, uintptr_t memory, int64_t num_entries, int device) {
                trace.begin(reinterpret_cast<void*>(memory), num_entries, device);
            },
            py::arg("memory"), py::arg("num_entries"), py::arg("device"))
        .def("end", &end, "(calls, how many were left out and why)")
        .def("take", &take, py::arg("num_tokens"), py::arg("num_experts"), py::arg("top_k"),
             py::arg("hidden"), py::arg("intermediate"), py::arg("num_ranks") = 1, py::arg("device") = 0,
             py::arg("is_captured") = false);
    py::list kinds, counters;
    for (int32_t i = 0; i < schedule::kNumTaskKinds; ++i) {
        kinds.append(schedule::task_kind_name(static_cast<schedule::TaskKind>(i)));
    }
    for (int32_t i = 0; i < schedule::kNumCounters; ++i) {
        counters.append(schedule::counter_name(static_cast<schedule::Counter>(i)));
    }
    module.attr("TASK_KINDS") = py::tuple(kinds);
    module.attr("COUNTERS") = py::tuple(counters);
    module.attr("TASK_SPAN_BYTES") = sizeof(TaskSpan);
#if defined(MOK_WITH_SM90)
    module.def(
        "call_trace", []() -> CallTrace& { return launch::call_trace(); }, py::return_value_policy::reference,
        "The trace that this process's calls ask.");
    module.def("load_traced_kernels", &launch::load_traced_kernels);
#endif
}

}  // namespace mok::python
