// Memory on a GPU as Python names it to the kernels' own bindings.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <tuple>

#include "csrc/launch/weight_view.h"

#pragma GCC visibility push(hidden)  // as pybind11's types have it

namespace mok::python {

/// Tensors by name: integers, and tuples of (address, strides in bytes ...).
class Arguments {
  public:
    explicit Arguments(const pybind11::dict& values) : values_(values) {}

    bool has(const char* name) const { return values_.contains(name); }
    int64_t integer(const char* name, int64_t otherwise = 0) const {
        return has(name) ? values_[name].cast<int64_t>() : otherwise;
    }
    void* address(const char* name) const { return reinterpret_cast<void*>(integer(name)); }
    launch::WeightView weights(const char* name, int64_t experts, int64_t rows, int64_t columns) const {
        if (!has(name)) return {};
        const auto [data, expert_stride, row_stride] =
            values_[name].cast<std::tuple<uintptr_t, int64_t, int64_t>>();
        return {reinterpret_cast<const void*>(data), experts, rows, columns, expert_stride, row_stride};
    }
    /// (address, is FP32, strides of experts and rows).
    launch::GradientView gradient(const char* name) const {
        if (!has(name)) return {};
        const auto [data, is_float32, expert_stride, row_stride] =
            values_[name].cast<std::tuple<uintptr_t, bool, int64_t, int64_t>>();
        return {reinterpret_cast<void*>(data), is_float32, expert_stride, row_stride};
    }
    launch::BiasView bias(const char* name) const {
        if (!has(name)) return {};
        const auto [data, expert_stride] = values_[name].cast<std::tuple<uintptr_t, int64_t>>();
        return {reinterpret_cast<const void*>(data), expert_stride};
    }

  private:
    pybind11::dict values_;
};

}  // namespace mok::python

#pragma GCC visibility pop
