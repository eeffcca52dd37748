#if defined(MOK_WITH_CUDA)

#include "csrc/symm/cuda_driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <mutex>

#include "csrc/comm/errors.h"
#include "csrc/layout/check.h"
#include "csrc/symm/device_mapping.h"

namespace mok {
namespace {

struct Libraries {
    std::mutex mutex;
    std::string driver_path = "libcuda.so.1";
    std::string nvml_path = "libnvidia-ml.so.1";
    // Never freed: what is freed at the end of the process may come after anything else.
    const CudaDriver* driver = nullptr;
    std::string error;
};

Libraries& libraries() {
    static Libraries& instance = *new Libraries;
    return instance;
}

std::string version_text(int version) {
    return concat(version / 1000, ".", version % 1000 / 10);
}

std::string visible_devices() {
    const char* text = std::getenv("CUDA_VISIBLE_DEVICES");
    return text == nullptr ? "CUDA_VISIBLE_DEVICES is not set"
                           : concat("CUDA_VISIBLE_DEVICES is '", text, "'");
}

std::string describe_with(const CudaDriver& driver, CUresult result) {
    const char *name = nullptr, *text = nullptr;
    if (driver.cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) name = "an unknown error";
    if (driver.cuGetErrorString(result, &text) != CUDA_SUCCESS || text == nullptr) text = "no description";
    return concat(name, " (", static_cast<int>(result), ", ", text, ")");
}

[[noreturn]] void throw_init_failed(const CudaDriver& driver, CUresult result) {
    const std::string what = describe_with(driver, result);
    switch (result) {
        case CUDA_ERROR_NO_DEVICE:
            throw HeapError(concat("the NVIDIA driver shows this process no GPU: ", what, "; ",
                                   visible_devices(),
                                   ": correct it, in a container ask for GPUs, or use CPU tensors."));
        case CUDA_ERROR_SYSTEM_NOT_READY:
            throw HeapError(
                concat("the NVIDIA driver is not ready: ", what,
                       "; on a machine with NVSwitch the fabric manager has to run first (systemctl start "
                       "nvidia-fabricmanager, of the driver's own version)."));
        case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
            throw HeapError(concat("the NVIDIA driver's library and kernel module have different versions: ",
                                   what, "; reload the module or restart the machine or container."));
        default:
            throw HeapError(
                concat("the NVIDIA driver cannot be initialised: ", what, "; see what nvidia-smi says."));
    }
}

const CudaDriver* load_driver(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        throw HeapError(concat("the NVIDIA driver's library cannot be loaded (", dlerror(),
                               "); install the driver, in a container ask for GPUs, or use CPU tensors."));
    }
    auto driver = std::make_unique<CudaDriver>();
    const char* missing = nullptr;
// Two steps, so that cuda.h's new name is what becomes the string.
#define MOK_CUDA_TEXT(name) #name
#define MOK_CUDA_LOAD(name)                                                                       \
    driver->name = reinterpret_cast<decltype(driver->name)>(dlsym(library, MOK_CUDA_TEXT(name))); \
    if (driver->name == nullptr && missing == nullptr) missing = MOK_CUDA_TEXT(name);
    MOK_CUDA_FUNCTIONS(MOK_CUDA_LOAD)
#undef MOK_CUDA_LOAD
#undef MOK_CUDA_TEXT
    if (missing != nullptr) {
        int version = 0;
        if (driver->cuDriverGetVersion != nullptr) driver->cuDriverGetVersion(&version);
        throw HeapError(concat("the NVIDIA driver (for CUDA ", version_text(version), ") has no ", missing,
                               "; this copy of mok was built with CUDA ", version_text(CUDA_VERSION),
                               ": install a driver for that or a newer one."));
    }
    const CUresult result = driver->cuInit(0);
    if (result != CUDA_SUCCESS) throw_init_failed(*driver, result);
    return driver.release();
}

// NVML's interface as its documentation has it; the toolkit does not always come with the header.
struct NvmlFabricInfo {
    unsigned char cluster_uuid[16];
    int status;  // of the registration, 0 for success
    unsigned int clique;
    unsigned char state;
};
constexpr unsigned char kNvmlFabricCompleted = 3;

}  // namespace

const CudaDriver& cuda_driver() {
    Libraries& all = libraries();
    const std::lock_guard lock(all.mutex);
    if (all.driver == nullptr) {
        if (!all.error.empty()) throw HeapError(all.error);
        try {
            all.driver = load_driver(all.driver_path);
        } catch (const HeapError& error) {
            const std::string text = error.what();
            all.error = text.substr(text.find(": ") + 2);  // without the class's name
            throw;
        }
    }
    return *all.driver;
}

void set_cuda_libraries(const std::string& driver, const std::string& nvml) {
    Libraries& all = libraries();
    const std::lock_guard lock(all.mutex);
    all.driver = nullptr;
    all.error.clear();
    all.driver_path = driver.empty() ? "libcuda.so.1" : driver;
    all.nvml_path = nvml.empty() ? "libnvidia-ml.so.1" : nvml;
}

std::string describe(CUresult result) {
    return describe_with(cuda_driver(), result);
}

FabricDomain fabric_domain(const std::string& gpu_uuid) {
    std::string path;
    {
        Libraries& all = libraries();
        const std::lock_guard lock(all.mutex);
        path = all.nvml_path;
    }
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return {};
    const auto init = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
    const auto by_uuid =
        reinterpret_cast<int (*)(const char*, void**)>(dlsym(library, "nvmlDeviceGetHandleByUUID"));
    const auto fabric_info =
        reinterpret_cast<int (*)(void*, NvmlFabricInfo*)>(dlsym(library, "nvmlDeviceGetGpuFabricInfo"));
    void* device = nullptr;
    NvmlFabricInfo info{};
    const bool known = init != nullptr && by_uuid != nullptr && fabric_info != nullptr && init() == 0 &&
                       by_uuid(gpu_uuid.c_str(), &device) == 0 && fabric_info(device, &info) == 0 &&
                       info.state == kNvmlFabricCompleted && info.status == 0;
    if (!known) return {};
    FabricDomain domain;
    for (unsigned char byte : info.cluster_uuid) {
        domain.cluster += "0123456789abcdef"[byte >> 4];
        domain.cluster += "0123456789abcdef"[byte & 15];
    }
    // One machine's own switch: the GPUs are a domain, but of no cluster.
    if (domain.cluster.find_first_not_of('0') == std::string::npos) return {};
    domain.clique = std::to_string(info.clique);
    return domain;
}

int num_cuda_devices() {
    int count = 0;
    return cuda_driver().cuDeviceGetCount(&count) == CUDA_SUCCESS ? count : 0;
}

std::string cuda_uuid(int device) {
    CUdevice handle = 0;
    CUuuid uuid{};
    if (cuda_driver().cuDeviceGet(&handle, device) != CUDA_SUCCESS ||
        cuda_driver().cuDeviceGetUuid(&uuid, handle) != CUDA_SUCCESS) {
        return "unknown";
    }
    std::string text = "GPU-";
    for (int i = 0; i < 16; ++i) {
        const auto byte = static_cast<unsigned char>(uuid.bytes[i]);
        if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
        text += "0123456789abcdef"[byte >> 4];
        text += "0123456789abcdef"[byte & 15];
    }
    return text;
}

CudaContext::CudaContext(int device) : driver_(cuda_driver()), ordinal_(device), owner_(getpid()) {
    const int count = num_cuda_devices();
    if (device < 0 || device >= count) {
        throw HeapError(concat("device is cuda:", device, ", but this process sees ", count, " GPU",
                               count == 1 ? "" : "s", " (", visible_devices(),
                               "); call torch.cuda.set_device with one of them."));
    }
    char name[128] = "GPU";
    CUresult result = driver_.cuDeviceGet(&device_, device);
    if (result == CUDA_SUCCESS) {
        driver_.cuDeviceGetName(name, sizeof(name), device_);
        result = driver_.cuDevicePrimaryCtxRetain(&context_, device_);
    }
    name_ = concat(name, " (cuda:", device, ")");
    if (result != CUDA_SUCCESS) {
        throw HeapError(concat("no CUDA context can be had on ", name_, ": ", describe(result),
                               "; it may be full, in exclusive mode with another process on it, or broken: "
                               "see nvidia-smi."));
    }
    uuid_ = cuda_uuid(device);
}

CudaContext::~CudaContext() {
    // A forked process has no CUDA.
    if (getpid() == owner_) driver_.cuDevicePrimaryCtxRelease(device_);
}

int CudaContext::attribute(CUdevice_attribute attribute) const {
    int value = 0;
    return driver_.cuDeviceGetAttribute(&value, attribute, device_) == CUDA_SUCCESS ? value : 0;
}

CudaContext::Scope::Scope(const CudaContext& context)
    : driver_(context.driver_), pushed_(driver_.cuCtxPushCurrent(context.context_) == CUDA_SUCCESS) {
    if (pushed_) driver_.cuThreadExchangeStreamCaptureMode(&mode_);
}

CudaContext::Scope::~Scope() {
    if (!pushed_) return;
    driver_.cuThreadExchangeStreamCaptureMode(&mode_);
    CUcontext popped = nullptr;
    driver_.cuCtxPopCurrent(&popped);
}

}  // namespace mok

#endif  // MOK_WITH_CUDA
