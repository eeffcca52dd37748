// The tensors that a backward call writes its gradients to.
#pragma once

#include <cstdint>
#include <vector>

#include "csrc/bindings/torch/arguments.h"
#include "csrc/cpu/call.h"

#pragma GCC visibility push(hidden)

namespace mok::bindings {

/// Of `gradients_out` (docs/architecture.md has their order), those that the mask `gradients` asks for, each
/// contiguous and of the right sizes and dtype. Throws std::invalid_argument with a sentence.
cpu::BackwardOutputs backward_outputs(const cpu::LayerInputs& inputs, int64_t num_local_experts,
                                      int64_t gradients, const std::vector<Tensor>& gradients_out);

}  // namespace mok::bindings

#pragma GCC visibility pop
