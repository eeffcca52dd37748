// The one way a kernel is launched.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "csrc/launch/error.h"

namespace mok::launch {

struct LaunchShape {
    uint32_t blocks;
    uint32_t threads;
    uint32_t shared_bytes = 0;  // dynamic; kernels have no other
    uint32_t cluster = 1;       // blocks of a cluster; divides `blocks`
    bool cooperative = false;   // all blocks are resident at once, or the launch fails
};

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
