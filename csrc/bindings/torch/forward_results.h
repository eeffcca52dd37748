// What torch.ops.mok._moe_forward allocates and returns, and how it refuses arguments.
#pragma once

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "csrc/bindings/torch/arguments.h"
#include "csrc/layout/check.h"

#pragma GCC visibility push(hidden)

namespace mok::bindings {

/// Rows of the context that a forward keeps: those of x, those of gate and up, the tokens of the shared
/// expert's gate and up. mok.shapes.context_shapes decides them.
struct ContextRows {
    int64_t x;
    int64_t gate_up;
    int64_t shared;
};

/// Unfilled, in x's dtype, contiguous; what the executor and the launches write into.
struct ForwardResults {
    Tensor out;                 // [T, H]
    std::vector<Tensor> saved;  // x_rows, gate, up, shared_gate, shared_up

    using Tuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
    Tuple tuple() const { return {out, saved[0], saved[1], saved[2], saved[3], saved[4]}; }
};

/// For arguments that layer_inputs has looked at.
ForwardResults empty_forward(const OpArguments& arguments, const ContextRows& rows);

/// The sizes that the backends look at only once a call has begun.
void check_call_sizes(const cpu::LayerShape& shape);

/// What `make` returns. The peers do not hear why it throws: mok/_library.py tells them, in its own words.
template <typename Make>
auto refusing(const Make& make) {
    try {
        return make();
    } catch (const std::invalid_argument& error) {
        throw std::runtime_error(concat("mok.untold: mok.ValueError: ", error.what()));
    } catch (const std::exception& error) {
        throw std::runtime_error(concat("mok.untold: ", error.what()));
    }
}

}  // namespace mok::bindings

#pragma GCC visibility pop
