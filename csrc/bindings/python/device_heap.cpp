// What of the heap and its barriers is peculiar to GPUs, for mok/workspace.py and the tests.
#include "csrc/symm/device_heap.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "csrc/layout/check.h"
#include "csrc/symm/device_mapping.h"
#include "csrc/symm/registry.h"
#include "csrc/symm/workspace.h"
#if defined(MOK_WITH_CUDA)
#include "csrc/launch/device_workspace.h"
#include "csrc/launch/peer_barrier.h"
#include "csrc/launch/peer_tests.h"
#endif

namespace py = pybind11;

namespace mok::python {
namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

void bind_report(py::module_& module) {
    py::class_<DeviceReport>(module, "DeviceReport", "csrc/symm/device_mapping.h")
        .def_readonly("device", &DeviceReport::device)
        .def_readonly("gpu", &DeviceReport::gpu)
        .def_readonly("uuid", &DeviceReport::uuid)
        .def_readonly("backing", &DeviceReport::backing)
        .def_readonly("reason", &DeviceReport::reason)
        .def_readonly("cluster", &DeviceReport::cluster)
        .def_readonly("clique", &DeviceReport::clique)
        .def_readonly("reachable", &DeviceReport::reachable)
        .def_readonly("unreachable", &DeviceReport::unreachable);
    module.def("describe_device", &describe_device, py::arg("device"), Unlocked());
    module.def("set_cuda_libraries", &set_cuda_libraries, py::arg("driver"), py::arg("nvml"),
               "Where the driver and NVML are loaded from; empty names are the system's own.");
    module.def(
        "virtual_heaps",
        [](int num_ranks, int64_t fixed_bytes, int64_t arena_bytes, int device) {
            return SymmHeap::create_virtual(num_ranks, fixed_bytes, arena_bytes, device);
        },
        py::arg("num_ranks"), py::arg("fixed_bytes"), py::arg("arena_bytes"), py::arg("device"), Unlocked(),
        "The connected heaps of so many ranks that this process plays itself on one GPU.");
}

#if defined(MOK_WITH_CUDA)

/// The barriers of one rank over a heap, without a workspace: for tests and virtual ranks.
class HeldDeviceComm {
  public:
    explicit HeldDeviceComm(std::shared_ptr<SymmHeap> heap) : heap_(std::move(heap)) {
        MOK_CHECK(heap_->device() != kHostDevice, "heap is in host memory; make it with device=...");
        heap_->window(heap_->rank());
        comm_ = make_device_comm(*heap_);
    }
    SymmHeap& heap() {
        heap_->window(heap_->rank());  // throws if closed
        return *heap_;
    }
    DeviceComm& comm() {
        heap();
        return *comm_;
    }

    void barrier(uint32_t phase, uintptr_t stream) {
        comm().check();
        const std::shared_ptr<void> current = enter();
        launch::launch_peer_barrier(comm_->group(), static_cast<PeerPhase>(phase),
                                    reinterpret_cast<void*>(stream));
    }
    void abort(const std::string& reason, uintptr_t stream) {
        comm().check();
        const std::shared_ptr<void> current = enter();
        launch::launch_peer_end(comm_->group(), reason, reinterpret_cast<void*>(stream));
        comm_->end(reason);
    }

    void rounds(uint32_t rounds, int64_t data_offset, uint64_t first, uintptr_t wrong, uintptr_t passed,
                bool blocks_are_ranks, uintptr_t stream) {
        comm().check();
        const std::shared_ptr<void> current = enter();
        launch::launch_peer_rounds({comm_->group(), blocks_are_ranks, rounds, data_offset, first,
                                    reinterpret_cast<uint32_t*>(wrong), reinterpret_cast<uint32_t*>(passed)},
                                   reinterpret_cast<void*>(stream));
    }
    void copy(uintptr_t to, uintptr_t from, int64_t bytes, uintptr_t stream) {
        const std::shared_ptr<void> current = enter();
        launch::launch_copy_words(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes,
                                  reinterpret_cast<void*>(stream));
    }
    PeerRecord* record() { return heap().device_mapping()->host_record(heap_->rank()); }

  private:
    std::shared_ptr<void> enter() {
        std::shared_ptr<void> current = heap().device_mapping()->make_current();
        launch::load_peer_kernels();
        return current;
    }

    std::shared_ptr<SymmHeap> heap_;
    std::unique_ptr<DeviceComm> comm_;
};

void bind_device_comm(py::module_& module) {
    py::class_<HeldDeviceComm>(module, "DeviceComm",
                               "Barriers over a heap on a GPU (csrc/comm/device_comm.h).")
        .def(py::init<std::shared_ptr<SymmHeap>>(), py::arg("heap"))
        .def("barrier", &HeldDeviceComm::barrier, py::arg("phase"), py::arg("stream"), Unlocked(),
             "Launches a barrier on the stream (a cudaStream_t) and returns.")
        .def("abort", &HeldDeviceComm::abort, py::arg("reason"), py::arg("stream"), Unlocked())
        .def(
            "end_waits", [](HeldDeviceComm& self) { end_device_waits(self.heap()); }, Unlocked())
        .def(
            "set_timeout",
            [](HeldDeviceComm& self, double seconds) {
                set_device_timeout(self.heap(), self.comm(), seconds);
            },
            py::arg("seconds"), Unlocked())
        .def("rounds", &HeldDeviceComm::rounds, py::arg("rounds"), py::arg("data_offset"), py::arg("first"),
             py::arg("wrong"), py::arg("passed"), py::arg("blocks_are_ranks"), py::arg("stream"), Unlocked())
        .def("copy", &HeldDeviceComm::copy, py::arg("to"), py::arg("source"), py::arg("bytes"),
             py::arg("stream"), Unlocked())
        .def_property_readonly(
            "record", [](HeldDeviceComm& self) { return reinterpret_cast<uintptr_t>(self.record()); },
            "Address of the PeerRecord in host memory.")
        .def("check", [](HeldDeviceComm& self) { self.comm().check(); });
}

#endif  // MOK_WITH_CUDA

}  // namespace

void bind_device_heap(py::module_& module) {
    bind_report(module);
#if defined(MOK_WITH_CUDA)
    bind_device_comm(module);
#endif
}

void prepare_workspace(Workspace& workspace) {
#if defined(MOK_WITH_CUDA)
    if (workspace.is_device()) launch::prepare_device_workspace(workspace);
#else
    static_cast<void>(workspace);
#endif
}

void barrier_workspace(Workspace& workspace, uint32_t phase, uintptr_t stream) {
    MOK_CHECK(workspace.is_device(), "workspace ", workspace.name,
              " is on the CPU, where barriers belong to calls.");
#if defined(MOK_WITH_CUDA)
    launch::device_barrier(workspace, static_cast<PeerPhase>(phase), reinterpret_cast<void*>(stream));
#else
    static_cast<void>(phase), static_cast<void>(stream);
#endif
}

void end_workspace(Workspace& workspace, const std::string& reason, uintptr_t stream) {
#if defined(MOK_WITH_CUDA)
    if (workspace.is_device()) {
        return launch::abort_device_workspace(workspace, reason, reinterpret_cast<void*>(stream));
    }
#endif
    static_cast<void>(stream);
    abort_workspace(workspace, reason);
}

std::vector<int> shut_workspace(Workspace& workspace, double seconds) {
#if defined(MOK_WITH_CUDA)
    if (workspace.is_device()) {
        launch::close_device_workspace(workspace, seconds);
        return {};
    }
#endif
    return close_workspace(workspace, seconds);
}

}  // namespace mok::python
