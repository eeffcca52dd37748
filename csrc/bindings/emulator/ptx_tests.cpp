// The test kernels of csrc/ptx: csrc/launch/ptx_tests.h as torch.ops.mok._ptx_test and _sm90_ptx_test offer
// it on the device.
#include "csrc/launch/ptx_tests.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "csrc/bindings/emulator/session.h"

namespace py = pybind11;

namespace mok::emulator {

namespace {

using RunTest = void (*)(const std::string&, const launch::PtxTest&);

template <RunTest kRun>
emu::RunResult run_test(const std::string& name, const std::vector<py::array>& inputs,
                        const std::vector<int64_t>& numbers, const std::vector<py::array>& outputs,
                        const emu::RunOptions& options) {
    Session session;
    launch::PtxTest test;
    for (size_t i = 0; i < inputs.size(); ++i) {
        const std::string label = "inputs[" + std::to_string(i) + "]";
        test.inputs.push_back({session.add(label, inputs[i], kInput), inputs[i].nbytes()});
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
        const std::string label = i + 1 == outputs.size() ? "limits" : "outputs[" + std::to_string(i) + "]";
        test.outputs.push_back({session.add(label, outputs[i], kOutput), outputs[i].nbytes()});
    }
    test.numbers = numbers;
    test.stream = &session.stream();
    kRun(name, test);
    return session.run(options);
}

}  // namespace

void bind_ptx_tests(py::module_& module) {
    module.def("ptx_test", &run_test<launch::run_ptx_test>, py::arg("name"), py::arg("inputs"),
               py::arg("numbers"), py::arg("outputs"), py::arg("options"));
    module.def("sm90_ptx_test", &run_test<launch::run_sm90_ptx_test>, py::arg("name"), py::arg("inputs"),
               py::arg("numbers"), py::arg("outputs"), py::arg("options"));
}

}  // namespace mok::emulator
