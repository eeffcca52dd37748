// A stand-in for libcuda.so.1 and NVML on a machine without a GPU: memory is memfds, copies are memcpy,
// nothing runs. Tests build it, have mok load it, and set what it lacks through fake_set and fake_fail.
#include <cuda.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace {

using Settings = std::map<std::string, long>;

const Settings kDefaults{{"devices", 2}, {"vmm", 1},    {"posix_fd", 1},   {"fabric", 0},       {"p2p", 1},
                         {"cluster", 0}, {"clique", 0}, {"first_uuid", 1}, {"memory", 1L << 40}};

Settings& settings() {
    static Settings values = kDefaults;
    return values;
}

struct Failure {
    CUresult result;
    int calls_before;
};
std::map<std::string, Failure> failures;
std::map<std::string, long> live;
std::map<CUmemGenericAllocationHandle, int> handles;  // to memfds
CUmemGenericAllocationHandle next_handle = 1;

bool fails(const char* function, CUresult& result) {
    const auto found = failures.find(function);
    if (found == failures.end() || found->second.calls_before-- > 0) return false;
    result = found->second.result;
    return true;
}

#define FAKE(name)                    \
    CUresult injected = CUDA_SUCCESS; \
    if (fails(#name, injected)) return injected

void* place(CUdeviceptr address) {
    return reinterpret_cast<void*>(address);
}

}  // namespace

extern "C" {

void fake_set(const char* name, long value) {
    settings()[name] = value;
}
/// The call of this function after so many others, and all later ones, return the error.
void fake_fail(const char* function, int result, int calls_before) {
    failures[function] = {static_cast<CUresult>(result), calls_before};
}
void fake_reset() {
    failures.clear();
    live.clear();
    settings() = kDefaults;
}
/// How many of these exist: contexts, streams, handles, mappings, reservations, plain, pinned.
long fake_live(const char* what) {
    return live[what];
}

CUresult cuInit(unsigned int) {
    FAKE(cuInit);
    return CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* version) {
#if defined(FAKE_OLD_DRIVER)
    *version = 11040;
#else
    *version = 13000;
#endif
    return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult result, const char** name) {
    switch (result) {
        case CUDA_ERROR_OUT_OF_MEMORY:
            *name = "CUDA_ERROR_OUT_OF_MEMORY";
            return CUDA_SUCCESS;
        case CUDA_ERROR_NOT_PERMITTED:
            *name = "CUDA_ERROR_NOT_PERMITTED";
            return CUDA_SUCCESS;
        case CUDA_ERROR_SYSTEM_NOT_READY:
            *name = "CUDA_ERROR_SYSTEM_NOT_READY";
            return CUDA_SUCCESS;
        default:
            *name = "CUDA_ERROR_OF_THE_TEST";
            return CUDA_SUCCESS;
    }
}
CUresult cuGetErrorString(CUresult, const char** text) {
    *text = "as the test wants it";
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) {
    *count = static_cast<int>(settings()["devices"]);
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    if (ordinal >= settings()["devices"]) return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char* name, int length, CUdevice) {
    snprintf(name, static_cast<size_t>(length), "Fake GPU");
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
    memset(uuid, 0, sizeof(*uuid));
    uuid->bytes[0] = static_cast<char>(settings()["first_uuid"] + device);
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ? settings()["vmm"]
             : attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
                 ? settings()["posix_fd"]
             : attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED ? settings()["fabric"]
                                                                             : 0;
    return CUDA_SUCCESS;
}
CUresult cuDeviceCanAccessPeer(int* can, CUdevice, CUdevice) {
    *can = static_cast<int>(settings()["p2p"]);
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) {
    FAKE(cuDevicePrimaryCtxRetain);
    *context = reinterpret_cast<CUcontext>(0x1000);
    ++live["contexts"];
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRelease(CUdevice) {
    --live["contexts"];
    return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext) {
    FAKE(cuCtxPushCurrent);
    return CUDA_SUCCESS;
}
CUresult cuCtxPopCurrent(CUcontext*) {
    return CUDA_SUCCESS;
}
CUresult cuCtxSynchronize() {
    return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) {
    return CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream* stream, unsigned int) {
    FAKE(cuStreamCreate);
    *stream = reinterpret_cast<CUstream>(0x2000);
    ++live["streams"];
    return CUDA_SUCCESS;
}
CUresult cuStreamDestroy(CUstream) {
    --live["streams"];
    return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream) {
    FAKE(cuStreamSynchronize);
    return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream, CUstreamCaptureStatus* status) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}
CUresult cuMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
    *free_bytes = *total_bytes = static_cast<size_t>(settings()["memory"]);
    return CUDA_SUCCESS;
}
CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
    if (bytes > static_cast<size_t>(settings()["memory"])) return CUDA_ERROR_OUT_OF_MEMORY;
    void* memory = aligned_alloc(4096, bytes);
    memset(memory, 0xa5, bytes);
    *address = reinterpret_cast<CUdeviceptr>(memory);
    ++live["plain"];
    return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) {
    free(place(address));
    --live["plain"];
    return CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void** memory, size_t bytes, unsigned int) {
    FAKE(cuMemHostAlloc);
    *memory = malloc(bytes);
    memset(*memory, 0xa5, bytes);
    ++live["pinned"];
    return CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void* memory) {
    free(memory);
    --live["pinned"];
    return CUDA_SUCCESS;
}
CUresult cuMemHostGetDevicePointer(CUdeviceptr* address, void* memory, unsigned int) {
    *address = reinterpret_cast<CUdeviceptr>(memory);
    return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t bytes, CUstream) {
    memset(place(address), value, bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t bytes, CUstream) {
    memcpy(place(to), from, bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t bytes, CUstream) {
    memcpy(to, place(from), bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
    *bytes = 2 << 20;
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                     const CUmemAllocationProp* properties, unsigned long long) {
    FAKE(cuMemCreate);
    const bool fabric = (properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) != 0;
    if (fabric && settings()["fabric"] == 2) return CUDA_ERROR_NOT_PERMITTED;  // no IMEX
    if (bytes > static_cast<size_t>(settings()["memory"])) return CUDA_ERROR_OUT_OF_MEMORY;
    if (bytes % (2 << 20) != 0) return CUDA_ERROR_INVALID_VALUE;
    const int fd = memfd_create("fake-gpu", MFD_CLOEXEC);
    if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    // What fresh memory holds is nobody's business: here it is no zeros.
    const char dirt[4096] = {'d', 'i', 'r', 't'};
    for (size_t at = 0; at < bytes && at < (8 << 20); at += sizeof(dirt)) {
        if (pwrite(fd, dirt, sizeof(dirt), static_cast<off_t>(at)) < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *handle = next_handle++;
    handles[*handle] = fd;
    ++live["handles"];
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    close(handles.at(handle));
    handles.erase(handle);
    --live["handles"];
    return CUDA_SUCCESS;
}
CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType kind, unsigned long long) {
    FAKE(cuMemExportToShareableHandle);
    if (kind == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        *static_cast<int*>(out) = fcntl(handles.at(handle), F_DUPFD_CLOEXEC, 0);
        return CUDA_SUCCESS;
    }
    memset(out, 0, sizeof(CUmemFabricHandle));
    snprintf(static_cast<char*>(out), sizeof(CUmemFabricHandle), "/proc/%d/fd/%d", getpid(),
             handles.at(handle));
    return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* from,
                                        CUmemAllocationHandleType kind) {
    FAKE(cuMemImportFromShareableHandle);
    const int fd = kind == CU_MEM_HANDLE_TYPE_FABRIC
                       ? open(static_cast<const char*>(from), O_RDWR | O_CLOEXEC)
                       : fcntl(static_cast<int>(reinterpret_cast<intptr_t>(from)), F_DUPFD_CLOEXEC, 0);
    if (fd < 0) return CUDA_ERROR_INVALID_HANDLE;
    *handle = next_handle++;
    handles[*handle] = fd;
    ++live["handles"];
    return CUDA_SUCCESS;
}
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
    FAKE(cuMemAddressReserve);
    void* range = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (range == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = reinterpret_cast<CUdeviceptr>(range);
    ++live["reservations"];
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    munmap(place(address), bytes);
    --live["reservations"];
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
    FAKE(cuMemMap);
    if (mmap(place(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, handles.at(handle), 0) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    ++live["mappings"];
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t bytes) {
    mmap(place(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    --live["mappings"];
    return CUDA_SUCCESS;
}
#if !defined(FAKE_OLD_DRIVER)
CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc*, size_t) {
    FAKE(cuMemSetAccess);
    mprotect(place(address), bytes, PROT_READ | PROT_WRITE);
    return CUDA_SUCCESS;
}
#endif

int nvmlInit_v2() {
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char*, void** device) {
    *device = nullptr;
    return 0;
}
int nvmlDeviceGetGpuFabricInfo(void*, void* info) {
    auto* bytes = static_cast<unsigned char*>(info);
    memset(bytes, 0, 28);
    bytes[0] = static_cast<unsigned char>(settings()["cluster"]);
    bytes[20] = static_cast<unsigned char>(settings()["clique"]);
    bytes[24] = 3;  // registration completed
    return 0;
}

}  // extern "C"
