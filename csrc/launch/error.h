// What goes wrong between the CUDA runtime and us, in sentences.
#pragma once

#include <driver_types.h>

#include <stdexcept>

namespace mok::launch {

class CudaError : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Throws CudaError unless `status` is success; `what` is the kernel or call that failed.
void check_cuda(cudaError_t status, const char* what);

}  // namespace mok::launch
