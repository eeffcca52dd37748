// The forward megakernel of all ranks on the emulated machine.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "csrc/bindings/emulator/moe_run.h"
#include "csrc/launch/sm90_bf16_moe_forward.h"

namespace py = pybind11;

namespace mok::emulator {

namespace {

class ForwardRun : public MoeRun {
  public:
    ForwardRun(const py::dict& layer, const std::vector<py::dict>& ranks)
        : MoeRun(layer, ranks,
                 layer.contains("recompute") && layer["recompute"].cast<bool>() ? schedule::Pass::kRecompute
                                                                                : schedule::Pass::kForward,
                 {{"home_rows", true}}) {}

  private:
    void add_launch(int rank) override {
        const int64_t ring = size("ring_rows");
        launch::MoeForward forward{};
        set_call(rank, forward);
        forward.ring_x = scratch(rank, "ring_x", ring, size("hidden"));
        forward.ring_hidden = scratch(rank, "ring_hidden", ring, size("intermediate"));
        forward.shared_hidden = scratch(rank, "shared_hidden", tokens(rank), size("shared_intermediate"));
        forward.saved_x = output(rank, "saved_x");
        forward.saved_gate = output(rank, "saved_gate");
        forward.saved_up = output(rank, "saved_up");
        forward.saved_shared_gate = output(rank, "saved_shared_gate");
        forward.saved_shared_up = output(rank, "saved_shared_up");
        launch_traced(rank, forward, launch::launch_sm90_bf16_moe_forward);
    }
};

emu::RunResult moe_forward(const py::dict& layer, const std::vector<py::dict>& ranks,
                           const emu::RunOptions& options) {
    return ForwardRun(layer, ranks).run(options);
}

}  // namespace

void bind_moe_forward(py::module_& module) {
    module.def(
        "moe_forward", &moe_forward, py::arg("layer"), py::arg("ranks"), py::arg("options"),
        "The forward megakernel on all ranks. `layer` holds numbers: num_experts, top_k, max_tokens, "
        "hidden, intermediate, shared_intermediate, ring_rows, save, activation, limit, num_blocks; with "
        "recompute the saved context is made and nothing else, with lose_pulls nobody fetches rows. A rank "
        "holds NumPy arrays, BF16 as uint16: x [T, H], ids [T, K], w_gate, w_up, w_down as (array, first "
        "row, row step, rows), b_*, the same with shared_; and results, filled where they are given: "
        "home_rows [max_tokens * K, H] (always), shared_rows [T, H], saved_x, saved_gate, saved_up, "
        "saved_shared_gate, saved_shared_up, limits (uint32 [80]: expired, a WaitRecord from byte 256 on), "
        "trace (uint8 [1 + tasks + pulls, 64], of which trace_tasks are for tasks).");
}

}  // namespace mok::emulator
