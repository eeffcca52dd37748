// Turns torch tensors into the executor's views, checking all that memory safety rests on.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "csrc/cpu/executor.h"

// torch::stable has hidden visibility, and so has what holds its types.
#pragma GCC visibility push(hidden)

namespace mok::bindings {

using torch::stable::Tensor;

/// The tensors and settings that forward, recompute and backward have in common, as the schemas spell them.
struct OpArguments {
    const Tensor& x;
    const Tensor& topk_ids;
    const Tensor& topk_weights;
    const Tensor& w_gate;
    const Tensor& w_up;
    const Tensor& w_down;
    const std::optional<Tensor>& b_gate;
    const std::optional<Tensor>& b_up;
    const std::optional<Tensor>& b_down;
    const std::optional<Tensor>& shared_gate;
    const std::optional<Tensor>& shared_up;
    const std::optional<Tensor>& shared_down;
    const std::optional<Tensor>& shared_weight;
    int64_t num_experts;
    int64_t max_tokens;
    int64_t ring_rows;
    const std::string& activation;
    std::optional<double> swiglu_limit;
    const std::string& save;
};

/// Throws std::invalid_argument with a sentence where an argument does not fit.
cpu::LayerInputs layer_inputs(const OpArguments& arguments);

/// saved: x_rows, gate, up, shared_gate, shared_up as forward returns them (empty where nothing is kept).
cpu::SavedContext saved_context(const std::vector<Tensor>& saved, const cpu::LayerShape& shape);

/// Throws where a tensor is not on x's device; layer_inputs has looked at the inputs.
void check_device(const Tensor& tensor, const char* name, const Tensor& x);
void check_devices(const std::vector<Tensor>& tensors, const char* name, const Tensor& x);

/// A contiguous gradient or output of exactly these sizes; nullptr for a tensor without elements.
void* checked_output(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes,
                     DType dtype);

DType compute_dtype(const Tensor& tensor, const char* name);

/// [T, H], last dimension contiguous, of the compute type; returns the row stride.
int64_t checked_rows(const Tensor& tensor, const char* name, int64_t tokens, int64_t hidden, DType dtype);

/// torch's intra-op threads as the executor's.
cpu::ThreadPool torch_threads();

}  // namespace mok::bindings

#pragma GCC visibility pop
