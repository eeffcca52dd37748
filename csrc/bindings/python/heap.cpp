// The symmetric heap, its barriers and the workspaces, for mok/workspace.py and the tests.
#include "csrc/symm/heap.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "csrc/comm/interrupt.h"
#include "csrc/comm/peer_comm.h"
#include "csrc/layout/check.h"
#include "csrc/symm/registry.h"
#include "csrc/symm/workspace.h"

namespace py = pybind11;

namespace mok::python {

// csrc/bindings/python/device_heap.cpp: what differs on a GPU.
void prepare_workspace(Workspace& workspace);
void barrier_workspace(Workspace& workspace, uint32_t phase, uintptr_t stream);
void end_workspace(Workspace& workspace, const std::string& reason, uintptr_t stream);
std::vector<int> shut_workspace(Workspace& workspace, double seconds);

namespace {

using Unlocked = py::call_guard<py::gil_scoped_release>;

/// Memory of an arena as a Python buffer, or on a GPU by __cuda_array_interface__. torch.frombuffer and
/// torch.as_tensor hold the object until the tensor's storage dies.
class ArenaBuffer {
  public:
    ArenaBuffer(SymmHeap& heap, int64_t bytes)
        : is_device_(heap.device() != kHostDevice),
          arena_(heap.arena()),
          data_(heap.arena_allocate(bytes)),
          bytes_(bytes),
          offset_(heap.offset(data_)) {}
    ArenaBuffer(const ArenaBuffer&) = delete;
    ArenaBuffer& operator=(const ArenaBuffer&) = delete;
    ~ArenaBuffer() { arena_->free(data_); }

    py::buffer_info buffer() const {
        if (is_device_) throw py::buffer_error("the memory is a GPU's; use __cuda_array_interface__");
        return {data_, 1, py::format_descriptor<uint8_t>::format(), 1, {bytes_}, {int64_t{1}}};
    }
    py::dict cuda_array_interface() const {
        if (!is_device_) throw py::attribute_error("the memory is the host's; use the buffer protocol");
        py::dict interface;
        interface["shape"] = py::make_tuple(bytes_);
        interface["typestr"] = "|u1";
        interface["data"] = py::make_tuple(reinterpret_cast<uintptr_t>(data_), false);
        interface["version"] = 2;
        return interface;
    }
    int64_t offset() const { return offset_; }

  private:
    bool is_device_;
    std::shared_ptr<Arena> arena_;
    void* data_;
    int64_t bytes_;
    int64_t offset_;
};

/// A PeerComm that cannot touch a heap after its end.
class HeldPeerComm {
  public:
    explicit HeldPeerComm(std::shared_ptr<SymmHeap> heap)
        : heap_(std::move(heap)),
          comm_(heap_->window(heap_->rank()), heap_->stride(), heap_->rank(), heap_->num_ranks()) {}
    PeerComm& open() {
        heap_->window(heap_->rank());
        return comm_;
    }

  private:
    std::shared_ptr<SymmHeap> heap_;
    PeerComm comm_;
};

/// What a signal's handler raised while a C++ wait slept: raised again by the interpreter as soon as it runs.
struct PendingError {
    PyObject* type;
    PyObject* value;
    PyObject* traceback;
};

int raise_pending(void* pointer) {
    const std::unique_ptr<PendingError> error(static_cast<PendingError*>(pointer));
    PyErr_Restore(error->type, error->value, error->traceback);
    return -1;
}

bool signal_raised() {
    if (!Py_IsInitialized()) return false;
    const py::gil_scoped_acquire locked;
    if (PyErr_CheckSignals() == 0) return false;
    auto error = std::make_unique<PendingError>();
    PyErr_Fetch(&error->type, &error->value, &error->traceback);
    if (Py_AddPendingCall(raise_pending, error.get()) == 0) error.release();
    return true;
}

DType parse_dtype(const std::string& name) {
    MOK_CHECK(name == "float32" || name == "bfloat16", "dtype is ", name,
              ", but must be float32 or bfloat16.");
    return name == "float32" ? DType::kFloat32 : DType::kBFloat16;
}

void bind_symm_heap(py::module_& module) {
    py::class_<ArenaBuffer>(module, "ArenaBuffer", py::buffer_protocol())
        .def_buffer([](ArenaBuffer& self) { return self.buffer(); })
        .def_property_readonly("__cuda_array_interface__", &ArenaBuffer::cuda_array_interface)
        .def_property_readonly("offset", &ArenaBuffer::offset, "Bytes from the window's start.");

    py::class_<SymmHeap, std::shared_ptr<SymmHeap>>(
        module, "SymmHeap",
        "Equal windows of memory, one per rank, all mapped by every rank (csrc/symm/heap.h).")
        .def(py::init<int, int, int64_t, int64_t, int>(), py::arg("rank"), py::arg("num_ranks"),
             py::arg("fixed_bytes"), py::arg("arena_bytes") = 0, py::arg("device") = kHostDevice, Unlocked())
        .def("address", &SymmHeap::address)
        .def("connect", &SymmHeap::connect, py::arg("addresses"), py::arg("timeout_s"), Unlocked())
        .def_property_readonly("rank", &SymmHeap::rank)
        .def_property_readonly("num_ranks", &SymmHeap::num_ranks)
        .def_property_readonly("stride", &SymmHeap::stride)
        .def_property_readonly("fixed_bytes", &SymmHeap::fixed_bytes)
        .def_property_readonly("device", &SymmHeap::device, "A CUDA device, or -1 for host memory.")
        .def_property_readonly("backing", &SymmHeap::backing)
        .def_property_readonly("closed", &SymmHeap::closed)
        .def("window",
             [](const SymmHeap& self, int rank) { return reinterpret_cast<uintptr_t>(self.window(rank)); })
        .def("peer",
             [](const SymmHeap& self, uintptr_t address, int rank) {
                 return reinterpret_cast<uintptr_t>(self.peer(reinterpret_cast<char*>(address), rank));
             })
        .def("contains",
             [](const SymmHeap& self, uintptr_t address, int64_t bytes) {
                 return self.contains(reinterpret_cast<const void*>(address), bytes);
             })
        .def("read",
             [](const SymmHeap& self, int rank, int64_t offset, int64_t bytes) {
                 MOK_CHECK(bytes >= 0 && bytes <= self.stride(), "bytes is ", bytes, ", but must be in [0, ",
                           self.stride(), "].");
                 std::string data(static_cast<size_t>(bytes), '\0');
                 self.read(rank, offset, data.data(), bytes);
                 return py::bytes(data);
             })
        .def("write",
             [](SymmHeap& self, int rank, int64_t offset, const py::bytes& data) {
                 const auto bytes = static_cast<std::string_view>(data);
                 self.write(rank, offset, bytes.data(), static_cast<int64_t>(bytes.size()));
             })
        .def("arena_allocate", [](SymmHeap& self, int64_t bytes) { return new ArenaBuffer(self, bytes); })
        .def_property_readonly("arena_in_use",
                               [](const SymmHeap& self) { return self.arena()->bytes_in_use(); })
        .def("close", &SymmHeap::close);
}

void bind_peer_comm(py::module_& module) {
    py::class_<HeldPeerComm>(module, "PeerComm", "Calls and barriers over a heap (csrc/comm/peer_comm.h).")
        .def(py::init<std::shared_ptr<SymmHeap>>(), py::arg("heap"))
        .def_static("control_bytes", &PeerComm::control_bytes, py::arg("num_ranks"))
        .def_static(
            "epoch_offset",
            [](int rank) { return reinterpret_cast<intptr_t>(&control_slot(nullptr, rank)->epoch); },
            py::arg("rank"),
            "Where in a window its owner finds the last barrier that `rank` reached (uint64).")
        .def("set_timeout", [](HeldPeerComm& self, double seconds) { self.open().set_timeout(seconds); })
        .def_property_readonly("timeout", [](HeldPeerComm& self) { return self.open().timeout(); })
        .def("begin_call", [](HeldPeerComm& self) { return self.open().begin_call(); })
        .def(
            "barrier", [](HeldPeerComm& self) { self.open().barrier(); }, Unlocked())
        .def("abort_call",
             [](HeldPeerComm& self, const std::string& reason) { self.open().abort_call(reason); })
        .def("abort_fatal",
             [](HeldPeerComm& self, const std::string& reason) { self.open().abort_fatal(reason); })
        .def("check", [](HeldPeerComm& self) { self.open().check(); })
        .def(
            "close", [](HeldPeerComm& self, double seconds) { return self.open().close(seconds); },
            Unlocked())
        .def("set_header",
             [](HeldPeerComm& self, const std::string& text) {
                 MOK_CHECK(text.size() < static_cast<size_t>(kCallHeaderBytes), "a call header has ",
                           text.size(), " bytes, but must have fewer than ", kCallHeaderBytes, ".");
                 memcpy(self.open().my_header(), text.c_str(), text.size() + 1);
             })
        .def("header", [](HeldPeerComm& self, int rank) { return std::string(self.open().header(rank)); });
}

void bind_workspace(py::module_& module) {
    py::class_<Workspace, std::shared_ptr<Workspace>>(module, "Workspace",
                                                      "One group's windows, barriers and scratch.")
        .def(py::init([](const std::string& name, int rank, int num_ranks, int64_t max_tokens,
                         int64_t hidden_size, int64_t top_k, const std::string& dtype, int64_t arena_bytes,
                         int device) {
                 return create_workspace({name, rank, num_ranks, max_tokens, hidden_size, top_k,
                                          parse_dtype(dtype), arena_bytes, device});
             }),
             py::arg("name"), py::arg("rank"), py::arg("num_ranks"), py::arg("max_tokens"),
             py::arg("hidden_size"), py::arg("top_k"), py::arg("dtype"), py::arg("arena_bytes"),
             py::arg("device") = kHostDevice, Unlocked())
        .def_property_readonly("name", [](const Workspace& self) { return self.name; })
        .def_property_readonly("closed", [](const Workspace& self) { return self.closed; })
        .def_property_readonly("backing", [](const Workspace& self) { return self.heap->backing(); })
        .def_property_readonly("device", [](const Workspace& self) { return self.heap->device(); })
        .def_property_readonly("window_bytes", [](const Workspace& self) { return self.heap->stride(); })
        .def_property_readonly("fixed_bytes", [](const Workspace& self) { return self.heap->fixed_bytes(); })
        .def_property_readonly("scratch_bytes", [](const Workspace& self) { return self.scratch_bytes(); })
        .def_property_readonly("arena_in_use",
                               [](const Workspace& self) { return self.heap->arena()->bytes_in_use(); })
        .def("address", [](const Workspace& self) { return self.heap->address(); })
        .def(
            "connect",
            [](Workspace& self, const std::vector<std::string>& addresses, double timeout_s) {
                connect_workspace(self, addresses, timeout_s);
                prepare_workspace(self);
            },
            py::arg("addresses"), py::arg("timeout_s"), Unlocked())
        .def("register", &register_workspace)
        .def("set_timeout", &set_workspace_timeout, py::arg("seconds"), Unlocked())
        .def("arena_allocate",
             [](Workspace& self, int64_t bytes) { return new ArenaBuffer(*self.heap, bytes); })
        .def("contains",
             [](const Workspace& self, uintptr_t address, int64_t bytes) {
                 return self.heap->contains(reinterpret_cast<const void*>(address), bytes);
             })
        .def("barrier", &barrier_workspace, py::arg("phase"), py::arg("stream"), Unlocked())
        .def("abort", &end_workspace, py::arg("reason"), py::arg("stream") = 0, Unlocked())
        .def("check", &check_workspace, Unlocked())
        .def("close", &shut_workspace, py::arg("seconds"), Unlocked());
    module.def("default_timeout", &PeerComm::default_timeout);
    module.def("find_workspace", &find_workspace, py::arg("name"));
}

}  // namespace

void bind_heap(py::module_& module) {
    set_interrupt_check(signal_raised);
    bind_symm_heap(module);
    bind_peer_comm(module);
    bind_workspace(module);
}

}  // namespace mok::python
