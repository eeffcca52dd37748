// csrc/launch/emulator/tile_bugs.h over NumPy arrays.
#include "csrc/launch/emulator/tile_bugs.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>

#include "csrc/bindings/emulator/session.h"
#include "csrc/layout/check.h"

namespace py = pybind11;

namespace mok::emulator {

namespace {

emu::RunResult run_tile(const std::string& bug, const py::array_t<uint16_t>& a,
                        const py::array_t<uint16_t>& b, const py::array_t<uint16_t>& d,
                        const emu::RunOptions& options) {
    Session session;
    const auto add = [&](const char* name, const py::array& array, const Use& use) {
        MOK_CHECK(array.nbytes() == launch::kTileBufferBytes, name, " must have 64 x 64 elements.");
        return session.add(name, array, use);
    };
    const launch::TileBuffers buffers{add("a", a, kInput), add("b", b, kInput), add("d", d, kOutput)};
    launch::launch_tile(bug, buffers, session.limits(), session.stream());
    return session.run(options);
}

}  // namespace

void bind_tile_bugs(py::module_& module) {
    module.def("tile_bugs", &launch::tile_bugs);
    module.def("run_tile", &run_tile, py::arg("bug"), py::arg("a"), py::arg("b"), py::arg("d").noconvert(),
               py::arg("options"),
               "d = a b^T of BF16 bits [64, 64] by TMA and wgmma, with one of tile_bugs().");
}

}  // namespace mok::emulator
