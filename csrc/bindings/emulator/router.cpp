// A router's choice of experts on the emulated machine.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "csrc/bindings/emulator/session.h"
#include "csrc/launch/router_top_k.h"

namespace py = pybind11;

namespace mok::emulator {

namespace {

/// scores float32 [T, E], bias float32 [E], ids int64 [T, K].
emu::RunResult router_top_k(const py::array_t<float>& scores, const std::optional<py::array_t<float>>& bias,
                            const py::array_t<int64_t>& ids, const emu::RunOptions& options) {
    Session session;
    launch::RouterTopK choice{};
    choice.scores = static_cast<const float*>(session.add("scores", scores, kInput));
    if (bias) choice.bias = static_cast<const float*>(session.add("bias", *bias, kInput));
    choice.ids = static_cast<int64_t*>(session.add("ids", ids, kOutput));
    choice.tokens = scores.shape(0);
    choice.experts = scores.shape(1);
    choice.top_k = ids.shape(1);
    launch::launch_router_top_k(choice, &session.stream());
    return session.run(options);
}

}  // namespace

void bind_router(py::module_& module) {
    module.def("router_top_k", &router_top_k, py::arg("scores"), py::arg("bias"), py::arg("ids"),
               py::arg("options"));
}

}  // namespace mok::emulator
