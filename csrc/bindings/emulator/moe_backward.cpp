// The backward megakernel of all ranks on the emulated machine.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "csrc/bindings/emulator/moe_run.h"
#include "csrc/launch/sm90_bf16_moe_backward.h"

namespace py = pybind11;

namespace mok::emulator {

namespace {

constexpr int64_t kPartialColumns = 64;

class BackwardRun : public MoeRun {
  public:
    BackwardRun(const py::dict& layer, const std::vector<py::dict>& ranks)
        : MoeRun(layer, ranks, schedule::Pass::kBackward,
                 {{"weights", false}, {"home_rows", true}, {"home_weight_grads", true}}) {}

  private:
    launch::GradientView gradient(int rank, const std::string& name) {
        if (!has(rank, name)) return {};
        const py::array data = ranks_[rank][name.c_str()].cast<py::array>();
        launch::GradientView view;
        view.data = output(rank, name);
        view.is_float32 = data.itemsize() == kFloatBytes;
        view.expert_stride = data.strides(0);
        view.row_stride = data.ndim() == 3 ? data.strides(1) : 0;
        return view;
    }
    launch::MoeGradientViews gradients(int rank, const std::string& prefix) {
        launch::MoeGradientViews views;
        const char* names[] = {"gate", "up", "down"};
        for (int m = 0; m < schedule::kNumMatrices; ++m) {
            views.weights[m] = gradient(rank, prefix + "dw_" + names[m]);
            views.biases[m] = gradient(rank, prefix + "db_" + names[m]);
        }
        return views;
    }

    void add_ring(int rank, launch::MoeBackward& backward) {
        const int64_t rows = size("ring_rows"), hidden = size("hidden"), inner = size("intermediate");
        backward.ring_x = scratch(rank, "ring_x", rows, hidden);
        backward.ring_dout = scratch(rank, "ring_dout", rows, hidden);
        backward.ring_gate = scratch(rank, "ring_gate", rows, inner);
        backward.ring_up = scratch(rank, "ring_up", rows, inner);
        backward.ring_dgate = scratch(rank, "ring_dgate", rows, inner);
        backward.ring_dup = scratch(rank, "ring_dup", rows, inner);
        backward.ring_hidden = scratch(rank, "ring_hidden", rows, inner);
        backward.ring_partials =
            scratch<float>(rank, "ring_partials", rows, ceil_div(inner, kPartialColumns), kFloatBytes);
        backward.ring_weights = scratch<float>(rank, "ring_weights", rows, 1, kFloatBytes);
        backward.accumulators = scratch<float>(
            rank, "accumulators", launch::moe_backward_accumulators(hidden, inner), 1, kFloatBytes);
    }

    void add_shared(int rank, launch::MoeBackward& backward) {
        const int64_t rows = tokens(rank), inner = size("shared_intermediate");
        const bool is_saved = size("save") != 0;
        backward.shared_gate =
            is_saved ? input(rank, "saved_shared_gate") : scratch(rank, "shared_gate", rows, inner);
        backward.shared_up =
            is_saved ? input(rank, "saved_shared_up") : scratch(rank, "shared_up", rows, inner);
        backward.shared_dgate = scratch(rank, "shared_dgate", rows, inner);
        backward.shared_dup = scratch(rank, "shared_dup", rows, inner);
        backward.shared_hidden = scratch(rank, "shared_hidden", rows, inner);
        backward.shared_partials =
            scratch<float>(rank, "shared_partials", rows, ceil_div(inner, kPartialColumns), kFloatBytes);
        backward.shared_weight = reinterpret_cast<const float*>(input(rank, "shared_weight"));
        backward.shared_weight_grads = static_cast<float*>(output(rank, "shared_weight_grads"));
        backward.shared_gradients = gradients(rank, "shared_");
    }

    void add_launch(int rank) override {
        launch::MoeBackward backward{};
        set_call(rank, backward);
        backward.dout = inputs_[rank].dout;
        backward.dout_stride = row_bytes();
        add_ring(rank, backward);
        add_shared(rank, backward);
        backward.saved_x = input(rank, "saved_x");
        backward.saved_gate = input(rank, "saved_gate");
        backward.saved_up = input(rank, "saved_up");
        backward.weights = reinterpret_cast<const float*>(home(rank, "weights"));
        backward.home_weight_grads = reinterpret_cast<float*>(home(rank, "home_weight_grads"));
        backward.routed_gradients = gradients(rank, "");
        backward.accumulate = flag("accumulate");
        launch_traced(rank, backward, launch::launch_sm90_bf16_moe_backward);
    }
};

emu::RunResult moe_backward(const py::dict& layer, const std::vector<py::dict>& ranks,
                            const emu::RunOptions& options) {
    return BackwardRun(layer, ranks).run(options);
}

}  // namespace

void bind_moe_backward(py::module_& module) {
    module.def(
        "moe_backward", &moe_backward, py::arg("layer"), py::arg("ranks"), py::arg("options"),
        "The backward megakernel on all ranks. `layer` holds numbers: num_experts, top_k, max_tokens, "
        "hidden, intermediate, shared_intermediate, ring_rows, save, activation, limit, num_blocks, "
        "gradients (mask), accumulate; with lose_pulls nobody fetches rows. A rank holds NumPy arrays, BF16 "
        "as uint16: x, dout [T, H], ids, "
        "weights [T, K], w_gate, w_up, w_down as (array, first row, row step, rows), b_*, the same "
        "with shared_, saved_*, shared_weight [T]; and results, filled where they are given: home_rows "
        "[max_tokens * K, H], home_weight_grads [max_tokens * K], shared_rows, shared_weight_grads, "
        "dw_*, db_*, shared_dw_*, limits (uint32 [80]: expired, a WaitRecord from byte 256 on), trace (uint8 "
        "[1 + tasks + pulls, 64], of which trace_tasks are for tasks).");
}

}  // namespace mok::emulator
