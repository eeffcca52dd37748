// The grouped GEMM on the emulated machine.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "csrc/bindings/emulator/block_names.h"
#include "csrc/bindings/emulator/moe_run.h"
#include "csrc/launch/sm90_bf16_grouped_gemm.h"

namespace py = pybind11;

namespace mok::emulator {

namespace {

emu::RunResult grouped_gemm(const py::array& x, const py::tuple& weights,
                            const py::array_t<int64_t>& segment_begin, const py::array_t<int64_t>& counts,
                            const py::array& y, const emu::RunOptions& options) {
    Session session;
    launch::GroupedGemm gemm{};
    gemm.x = session.add("x", x, kInput);
    gemm.weights = weight_view(session, "weights", weights, 0);
    gemm.y = session.add("y", y, kOutput);
    gemm.rows = x.shape(0);
    gemm.x_stride = x.shape(1) * kBfloat16Bytes;
    gemm.y_stride = y.shape(1) * kBfloat16Bytes;
    gemm.segment_begin = static_cast<const int64_t*>(session.add("segment_begin", segment_begin, kInput));
    gemm.counts = static_cast<const int64_t*>(session.add("counts", counts, kInput));
    gemm.claim = static_cast<uint64_t*>(session.zeros("claim", sizeof(uint64_t)));
    name_gemm_block(session.stream());
    launch::launch_sm90_bf16_grouped_gemm(gemm, session.limits(), &session.stream());
    return session.run(options);
}

}  // namespace

void bind_grouped_gemm(py::module_& module) {
    module.def("grouped_gemm", &grouped_gemm, py::arg("x"), py::arg("weights"), py::arg("segment_begin"),
               py::arg("counts"), py::arg("y"), py::arg("options"),
               "y [rows, N] = x [rows, K] by the weights of each segment's expert, uint16 [E, N, K] given as "
               "(array, first row, row step, rows).");
}

}  // namespace mok::emulator
