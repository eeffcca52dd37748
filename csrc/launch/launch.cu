#include "csrc/launch/launch.cuh"
#include "csrc/layout/check.h"

namespace mok::launch {

namespace {

std::string device_name() {
    int device = 0;
    cudaDeviceProp properties{};
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaGetDeviceProperties(&properties, device) != cudaSuccess) {
        return "this GPU";
    }
    return concat(properties.name, " (sm_", properties.major, properties.minor, ")");
}

}  // namespace

void check_cuda(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    cudaGetLastError();  // a failed launch is not to surface again in somebody else's call
    switch (status) {
        case cudaErrorNoKernelImageForDevice:
        case cudaErrorInvalidDeviceFunction:
            throw CudaError(concat(what, ": this copy of mok has no kernels for ", device_name(),
                                   ": rebuild it with MOK_CUDA_ARCHS naming that architecture."));
        case cudaErrorCooperativeLaunchTooLarge:
            throw CudaError(concat(what, ": its blocks do not all fit on ", device_name(),
                                   " at once; another process or MPS limit may hold multiprocessors."));
        default:
            throw CudaError(concat(what, " failed on ", device_name(), ": ", cudaGetErrorString(status), " (",
                                   cudaGetErrorName(status), ")."));
    }
}

uint32_t num_multiprocessors() {
    int device = 0, count = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device),
               "cudaDeviceGetAttribute");
    return static_cast<uint32_t>(count);
}

}  // namespace mok::launch
