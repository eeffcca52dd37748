// mok._C: the torch-free half of the extension (pybind11): heap, plan, schedule, kernels for tests.
#include <pybind11/pybind11.h>

namespace mok::python {
void bind_errors(pybind11::module_& module);
void bind_heap(pybind11::module_& module);
void bind_device_heap(pybind11::module_& module);
void bind_device_preparation(pybind11::module_& module);
void bind_device_backward(pybind11::module_& module);
void bind_device_forward(pybind11::module_& module);
void bind_device_memory(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_schedule(pybind11::module_& module);
void bind_kernels(pybind11::module_& module);
void bind_trace(pybind11::module_& module);
}  // namespace mok::python

PYBIND11_MODULE(_C, module) {
    module.doc() = "The torch-free part of mok: symmetric heap, plan, schedule, simulator, CPU kernels.";
    mok::python::bind_errors(module);
    mok::python::bind_heap(module);
    mok::python::bind_device_heap(module);
    mok::python::bind_device_preparation(module);
    mok::python::bind_device_backward(module);
    mok::python::bind_device_forward(module);
    mok::python::bind_device_memory(module);
    mok::python::bind_plan(module);
    mok::python::bind_schedule(module);
    mok::python::bind_kernels(module);
    mok::python::bind_trace(module);
}
