// _emulator: the emulated machine and the kernels that run on it, for tests. No torch, no CUDA; not part of
// mok. Each group of kernels binds itself in a file of its own.
#include <pybind11/pybind11.h>

namespace mok::emulator {
void bind_run(pybind11::module_& module);
void bind_ptx_tests(pybind11::module_& module);
void bind_arithmetic(pybind11::module_& module);
void bind_planted_bugs(pybind11::module_& module);
void bind_tile_bugs(pybind11::module_& module);
void bind_grouped_gemm(pybind11::module_& module);
void bind_moe_forward(pybind11::module_& module);
void bind_moe_backward(pybind11::module_& module);
void bind_preparation(pybind11::module_& module);
void bind_combine(pybind11::module_& module);
void bind_peers(pybind11::module_& module);
void bind_router(pybind11::module_& module);
}  // namespace mok::emulator

PYBIND11_MODULE(_emulator, module) {
    module.doc() = "Runs mok's GPU kernels on the CPU, under seeded schedules and a checker.";
    mok::emulator::bind_run(module);
    mok::emulator::bind_ptx_tests(module);
    mok::emulator::bind_arithmetic(module);
    mok::emulator::bind_planted_bugs(module);
    mok::emulator::bind_tile_bugs(module);
    mok::emulator::bind_grouped_gemm(module);
    mok::emulator::bind_moe_forward(module);
    mok::emulator::bind_moe_backward(module);
    mok::emulator::bind_preparation(module);
    mok::emulator::bind_combine(module);
    mok::emulator::bind_peers(module);
    mok::emulator::bind_router(module);
}
