// The planted bugs that test the emulator's checker.
#include "csrc/launch/emulator/planted_bugs.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "csrc/bindings/emulator/session.h"

namespace py = pybind11;

namespace mok::emulator {

namespace {

constexpr Use kWindow{true, false, true, true};
constexpr Use kFlags{false, false, true, false}, kPrivateFlags{false, false, false, false};

/// Of two ranks each: float32 inputs [1024], outputs [4096], windows [1024], uint32 limits [64]; the last
/// three are filled. Limits: the word that expires waits, and from word 32 on the WaitRecord.
emu::RunResult run_planted_bug(const std::string& name, const std::vector<py::array_t<float>>& inputs,
                               const std::vector<py::array_t<float>>& outputs,
                               const std::vector<py::array_t<float>>& windows,
                               const std::vector<py::array_t<uint32_t>>& limits,
                               const emu::RunOptions& options) {
    Session session;
    launch::PlantedBuffers buffers{};
    const std::vector<uint32_t> zeros(64);
    const py::array_t<uint32_t> no_flags(static_cast<py::ssize_t>(zeros.size()), zeros.data());
    for (int rank = 0; rank < 2; ++rank) {
        const size_t r = static_cast<size_t>(rank);
        buffers.in[r] = session.add("in", inputs[r], kInput, rank);
        buffers.out[r] = session.add("out", outputs[r], kOutput, rank);
        buffers.words[r] = session.add("words", no_flags, kPrivateFlags, rank);
        buffers.limits[r] = session.add("limits", limits[r], kOutput, rank);
        buffers.window[r] = session.add("window", windows[r], kWindow, rank);
        buffers.flags[r] = session.add("flags", no_flags, kFlags, rank);
    }
    for (int rank = 0; rank < 2; ++rank) {
        launch::launch_planted_bug(name, buffers, rank, session.stream(rank));
    }
    return session.run(options);
}

}  // namespace

void bind_planted_bugs(py::module_& module) {
    module.def("planted_bugs", &launch::planted_bugs);
    module.def("run_planted_bug", &run_planted_bug, py::arg("name"), py::arg("inputs"), py::arg("outputs"),
               py::arg("windows"), py::arg("limits"), py::arg("options"));
}

}  // namespace mok::emulator
