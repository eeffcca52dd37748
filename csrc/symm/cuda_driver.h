// The CUDA driver as a table of functions, loaded at the first use: nothing links libcuda, so that mok
// imports where there is none. Only for builds with CUDA; csrc/symm/device_mapping.h is what other builds
// see.
#pragma once

#include <cuda.h>
#include <sys/types.h>

#include <string>

namespace mok {

// cuda.h renames many of these to a version (cuMemGetInfo_v2): the table has what the header declares.
#define MOK_CUDA_FUNCTIONS(X)            \
    X(cuInit)                            \
    X(cuDriverGetVersion)                \
    X(cuGetErrorName)                    \
    X(cuGetErrorString)                  \
    X(cuDeviceGetCount)                  \
    X(cuDeviceGet)                       \
    X(cuDeviceGetName)                   \
    X(cuDeviceGetUuid)                   \
    X(cuDeviceGetAttribute)              \
    X(cuDeviceCanAccessPeer)             \
    X(cuDevicePrimaryCtxRetain)          \
    X(cuDevicePrimaryCtxRelease)         \
    X(cuCtxPushCurrent)                  \
    X(cuCtxPopCurrent)                   \
    X(cuCtxSynchronize)                  \
    X(cuThreadExchangeStreamCaptureMode) \
    X(cuStreamCreate)                    \
    X(cuStreamDestroy)                   \
    X(cuStreamSynchronize)               \
    X(cuStreamIsCapturing)               \
    X(cuMemGetInfo)                      \
    X(cuMemAlloc)                        \
    X(cuMemFree)                         \
    X(cuMemHostAlloc)                    \
    X(cuMemFreeHost)                     \
    X(cuMemHostGetDevicePointer)         \
    X(cuMemsetD8Async)                   \
    X(cuMemcpyHtoDAsync)                 \
    X(cuMemcpyDtoHAsync)                 \
    X(cuMemGetAllocationGranularity)     \
    X(cuMemCreate)                       \
    X(cuMemRelease)                      \
    X(cuMemExportToShareableHandle)      \
    X(cuMemImportFromShareableHandle)    \
    X(cuMemAddressReserve)               \
    X(cuMemAddressFree)                  \
    X(cuMemMap)                          \
    X(cuMemUnmap)                        \
    X(cuMemSetAccess)

struct CudaDriver {
#define MOK_CUDA_MEMBER(name) decltype(&::name) name = nullptr;
    MOK_CUDA_FUNCTIONS(MOK_CUDA_MEMBER)
#undef MOK_CUDA_MEMBER
};

/// Loads and initialises the driver, once. Throws HeapError, each time alike, where there is none, it is too
/// old, or it has no GPU to offer.
const CudaDriver& cuda_driver();
/// "CUDA_ERROR_OUT_OF_MEMORY (2, out of memory)".
std::string describe(CUresult result);

/// The NVLink domain of a GPU, as the fabric manager assigned it; empty where there is none.
struct FabricDomain {
    std::string cluster;  // 32 hexadecimal digits
    std::string clique;

    bool operator==(const FabricDomain&) const = default;
};

/// Asks NVML; empty if it cannot be asked.
FabricDomain fabric_domain(const std::string& gpu_uuid);

/// The primary context of a device, the one torch works in. Current, and any capture of this thread left
/// alone, while a Scope lives.
class CudaContext {
  public:
    /// Throws HeapError naming the device and what is wrong with it.
    explicit CudaContext(int device);
    CudaContext(const CudaContext&) = delete;
    CudaContext& operator=(const CudaContext&) = delete;
    ~CudaContext();

    /// The table it was made with.
    const CudaDriver& driver() const { return driver_; }
    int ordinal() const { return ordinal_; }
    CUdevice device() const { return device_; }
    const std::string& name() const { return name_; }  // "NVIDIA H200 (cuda:0)"
    const std::string& uuid() const { return uuid_; }  // "GPU-..." as nvidia-smi prints it
    int attribute(CUdevice_attribute attribute) const;

    class Scope {
      public:
        explicit Scope(const CudaContext& context);
        Scope(const Scope&) = delete;
        Scope& operator=(const Scope&) = delete;
        ~Scope();
        /// False once the context is gone, as at the end of the process.
        explicit operator bool() const { return pushed_; }

      private:
        const CudaDriver& driver_;
        bool pushed_;
        CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
    };

  private:
    const CudaDriver& driver_;
    int ordinal_;
    pid_t owner_;
    CUdevice device_ = 0;
    CUcontext context_ = nullptr;
    std::string name_;
    std::string uuid_;
};

/// How many GPUs this process sees.
int num_cuda_devices();
std::string cuda_uuid(int device);

}  // namespace mok
