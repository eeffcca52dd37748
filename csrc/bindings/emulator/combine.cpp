// The combine epilogue on the emulated machine.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "csrc/bindings/emulator/session.h"
#include "csrc/launch/weighted_sum.h"

namespace py = pybind11;

namespace mok::emulator {

namespace {

/// rows [T * K, H] and out [T, H] of uint16 (BF16) or float32, ids int32 [T * K], weights float32 [T * K].
emu::RunResult weighted_sum(const py::array& rows, const std::optional<py::array>& shared_rows,
                            const std::optional<py::array_t<float>>& shared_weight,
                            const py::array_t<int32_t>& ids, const std::optional<py::array_t<float>>& weights,
                            const py::array& out, const emu::RunOptions& options) {
    Session session;
    const auto input = [&](const char* name, const auto& array) -> void* {
        return array ? session.add(name, *array, kInput) : nullptr;
    };
    launch::WeightedSum sum{};
    sum.dtype = rows.itemsize() == 2 ? DType::kBFloat16 : DType::kFloat32;
    sum.tokens = out.shape(0);
    sum.top_k = ids.size() / out.shape(0);
    sum.hidden = out.shape(1);
    sum.rows = session.add("rows", rows, kInput);
    sum.shared_rows = input("shared_rows", shared_rows);
    sum.shared_weight = static_cast<const float*>(input("shared_weight", shared_weight));
    sum.ids = static_cast<const int32_t*>(session.add("ids", ids, kInput));
    sum.weights = static_cast<const float*>(input("weights", weights));
    sum.out = session.add("out", out, kOutput);
    sum.rows_stride = sum.shared_stride = sum.out_stride = sum.hidden * rows.itemsize();
    launch::launch_weighted_sum(sum, &session.stream());
    return session.run(options);
}

}  // namespace

void bind_combine(py::module_& module) {
    module.def("weighted_sum", &weighted_sum, py::arg("rows"), py::arg("shared_rows"),
               py::arg("shared_weight"), py::arg("ids"), py::arg("weights"), py::arg("out"),
               py::arg("options"));
}

}  // namespace mok::emulator
