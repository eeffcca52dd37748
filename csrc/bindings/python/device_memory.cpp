// mok._C: what a layer's workspace would hold on a GPU.
#include "csrc/launch/device_memory.h"

#include <pybind11/pybind11.h>

#include "csrc/bindings/schedule_settings.h"
#include "csrc/layout/types.h"

namespace py = pybind11;

namespace mok::python {

#if defined(MOK_WITH_SM90)

namespace {

py::dict device_memory(int64_t max_tokens, int64_t hidden, int64_t intermediate, int64_t shared_intermediate,
                       int64_t num_experts, int64_t top_k, int32_t num_ranks, int64_t ring_rows,
                       const std::string& save, int64_t gradients, uint32_t multiprocessors) {
    CallHeader header{};
    header.num_tokens = header.max_tokens = max_tokens;
    header.hidden = hidden;
    header.intermediate = intermediate;
    header.shared_intermediate = shared_intermediate;
    header.num_experts = num_experts;
    header.top_k = top_k;
    header.dtype = static_cast<int64_t>(DType::kBFloat16);
    header.save = static_cast<int64_t>(bindings::parse_save(save));
    header.ring_rows = ring_rows;
    header.gradients = gradients;
    const launch::DeviceMemory memory = launch::device_memory(header, num_ranks, multiprocessors);
    py::dict result;
    result["inputs"] = memory.inputs;
    result["home_rows"] = memory.home_rows;
    result["flags"] = memory.flags;
    result["plan"] = memory.plan;
    result["rows"] = memory.rows;
    result["rounding"] = memory.rounding;
    return result;
}

}  // namespace

void bind_device_memory(py::module_& module) {
    module.def("device_memory", &device_memory, py::arg("max_tokens"), py::arg("hidden"),
               py::arg("intermediate"), py::arg("shared_intermediate"), py::arg("num_experts"),
               py::arg("top_k"), py::arg("num_ranks"), py::arg("ring_rows"), py::arg("save"),
               py::arg("gradients"), py::arg("multiprocessors"),
               "Bytes that one rank's workspace holds on a GPU (csrc/launch/device_memory.h), in BF16.");
}

#else

void bind_device_memory(py::module_&) {}

#endif  // MOK_WITH_SM90

}  // namespace mok::python
