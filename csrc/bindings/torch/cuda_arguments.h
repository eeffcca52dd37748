// CUDA tensors as pointers: their checks, the current stream, the device guard.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "csrc/layout/check.h"

#pragma GCC visibility push(hidden)

namespace mok::bindings {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

/// The device of `tensor` is the current one, and `stream` its current stream, while this lives.
class CudaCall {
  public:
    explicit CudaCall(const Tensor& tensor) : guard_(tensor.get_device_index()) {
        TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream_));
    }
    void* stream() const { return stream_; }

  private:
    torch::stable::accelerator::DeviceGuard guard_;
    void* stream_ = nullptr;
};

/// A contiguous CUDA tensor of this dtype with at least `elements` elements; nullptr if it has none.
template <typename T = void>
T* cuda_data(const Tensor& tensor, const char* name, ScalarType dtype, int64_t elements) {
    MOK_CHECK(tensor.is_cuda(), name, " must be a CUDA tensor.");
    MOK_CHECK(tensor.scalar_type() == dtype, name, " has torch dtype number ",
              static_cast<int>(tensor.scalar_type()), ", expected ", static_cast<int>(dtype), ".");
    MOK_CHECK(tensor.is_contiguous(), name, " must be contiguous.");
    MOK_CHECK(tensor.numel() >= elements, name, " has ", tensor.numel(), " elements, needs at least ",
              elements, ".");
    return tensor.numel() == 0 ? nullptr : static_cast<T*>(tensor.data_ptr());
}

}  // namespace mok::bindings

#pragma GCC visibility pop
