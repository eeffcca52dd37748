// A call's tensors as the kernels of a GPU take them.
#pragma once

#include <optional>

#include "csrc/bindings/torch/arguments.h"

#pragma GCC visibility push(hidden)

namespace mok::bindings {

/// Copies of what the kernels do not take as it is: weights and biases in FP32 (cast to BF16) or not aligned,
/// an expanded x. mok._kernels.as_kernels_take_them is the same in Python, for the other ops.
class FittedTensors {
  public:
    /// Keeps references to the arguments.
    explicit FittedTensors(const OpArguments& arguments);
    /// The arguments, with the copies in place of their originals; refers to this object.
    OpArguments arguments() const;

  private:
    OpArguments given_;
    std::optional<Tensor> x_, w_gate_, w_up_, w_down_;
    std::optional<Tensor> b_gate_, b_up_, b_down_, shared_gate_, shared_up_, shared_down_;
};

}  // namespace mok::bindings

#pragma GCC visibility pop
