// The one way a kernel is launched. Sources that include this compile for the device and, as C++, for the
// emulator.
#pragma once

#if !defined(__CUDACC__)
#include "csrc/launch/emulator/launch.h"
#else

#include <cuda_runtime.h>

#include <cstdint>

#include "csrc/launch/error.h"
#include "csrc/launch/launch_shape.h"

namespace mok::launch {

/// Launches `kernel(params)` on `stream` (a cudaStream_t) and returns at once; right under graph capture.
/// Throws CudaError, which names the kernel.
template <typename Params>
void launch(const char* name, void (*kernel)(Params), const LaunchShape& shape, void* stream,
            const Params& params) {
    constexpr uint32_t kSharedWithoutOptIn = 48 * 1024;
    if (shape.shared_bytes > kSharedWithoutOptIn) {
        check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(shape.shared_bytes)),
                   name);
    }
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(shape.blocks);
    config.blockDim = dim3(shape.threads);
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    config.attrs = attributes;
    if (shape.cluster > 1) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim.x = shape.cluster;
        attribute.val.clusterDim.y = 1;
        attribute.val.clusterDim.z = 1;
    }
    if (shape.cooperative) {
        cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
        attribute.id = cudaLaunchAttributeCooperative;
        attribute.val.cooperative = 1;
    }
    check_cuda(cudaLaunchKernelEx(&config, kernel, params), name);
}

/// Loads `kernel` now instead of at its first launch, which may not wait for the driver.
template <typename Params>
void load_kernel(const char* name, void (*kernel)(Params)) {
    cudaFuncAttributes attributes;
    check_cuda(cudaFuncGetAttributes(&attributes, kernel), name);
}

/// Multiprocessors of the current device.
uint32_t num_multiprocessors();

/// Blocks of `kernel` that fit on one multiprocessor.
template <typename Params>
uint32_t blocks_per_multiprocessor(const char* name, void (*kernel)(Params), uint32_t threads,
                                   uint32_t shared_bytes) {
    int blocks = 0;
    check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, static_cast<int>(threads),
                                                             shared_bytes),
               name);
    return static_cast<uint32_t>(blocks);
}

}  // namespace mok::launch

#endif  // defined(__CUDACC__)
