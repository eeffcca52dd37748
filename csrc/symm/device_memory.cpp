#if defined(MOK_WITH_CUDA)

#include "csrc/symm/device_memory.h"

#include <cstdlib>
#include <cstring>
#include <optional>

#include "csrc/comm/errors.h"
#include "csrc/layout/check.h"
#include "csrc/layout/types.h"

namespace mok {
namespace {

constexpr const char* kUseCollective = "use backend=\"collective\"";

std::string wanted_backing() {
    const char* text = std::getenv("MOK_HEAP_BACKING");
    const std::string wanted = text == nullptr || *text == '\0' ? "auto" : text;
    MOK_CHECK(wanted == "auto" || wanted == "fabric" || wanted == "posix_fd", "MOK_HEAP_BACKING is '", wanted,
              "', but it must be auto, fabric or posix_fd.");
    return wanted;
}

CUmemAllocationProp properties_of(const CudaContext& context, bool posix_fd, bool fabric) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = context.device();
    const int kinds =
        (posix_fd ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0) | (fabric ? CU_MEM_HANDLE_TYPE_FABRIC : 0);
    properties.requestedHandleTypes = static_cast<CUmemAllocationHandleType>(kinds);
    return properties;
}

size_t granularity_of(const CudaContext& context, const ShareKinds& kinds) {
    const CUmemAllocationProp properties = properties_of(context, kinds.posix_fd, kinds.fabric);
    size_t bytes = 0;
    const CUresult result = context.driver().cuMemGetAllocationGranularity(
        &bytes, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    if (result != CUDA_SUCCESS || bytes == 0) {
        throw HeapError(concat("the driver does not say how memory of ", context.name(),
                               " is divided: ", describe(result), "; ", kUseCollective, "."));
    }
    return bytes;
}

/// The least that can be allocated: what the driver really permits.
CUresult try_kinds(const CudaContext& context, const ShareKinds& kinds) {
    const CudaDriver& driver = context.driver();
    const CUmemAllocationProp properties = properties_of(context, kinds.posix_fd, kinds.fabric);
    CUmemGenericAllocationHandle handle = 0;
    CUresult result = driver.cuMemCreate(&handle, granularity_of(context, kinds), &properties, 0);
    if (result != CUDA_SUCCESS) return result;
    if (kinds.fabric) {
        CUmemFabricHandle fabric;
        result = driver.cuMemExportToShareableHandle(&fabric, handle, CU_MEM_HANDLE_TYPE_FABRIC, 0);
    }
    driver.cuMemRelease(handle);
    return result;
}

[[noreturn]] void throw_no_fabric(const CudaContext& context, const std::string& who,
                                  const std::string& why) {
    throw HeapError(concat(who, " is to use fabric handles (MOK_HEAP_BACKING=fabric), but ", why, " on ",
                           context.name(),
                           ": run nvidia-imex and give the container an IMEX channel "
                           "(/dev/nvidia-caps-imex-channels/channel0), or unset MOK_HEAP_BACKING."));
}

}  // namespace

ShareKinds choose_kinds(const CudaContext& context, const std::string& who, bool is_shared) {
    const CudaContext::Scope scope(context);
    if (context.attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) == 0) {
        throw HeapError(
            concat(who, " cannot share memory of ", context.name(),
                   ": device and driver offer no virtual memory management (as under some virtual "
                   "GPUs and WSL); ",
                   kUseCollective, "."));
    }
    ShareKinds kinds;
    if (!is_shared) {
        kinds.granularity = granularity_of(context, kinds);
        return kinds;
    }
    kinds.wanted = wanted_backing();
    kinds.posix_fd = context.attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) != 0;
    const bool has_fabric = context.attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED) != 0;
    if (kinds.wanted == "posix_fd") {
        kinds.reason = "MOK_HEAP_BACKING=posix_fd";
    } else if (!has_fabric) {
        kinds.reason = "the device offers no fabric handles";
        if (kinds.wanted == "fabric") throw_no_fabric(context, who, "the driver offers none");
    } else {
        kinds.fabric = true;
        const CUresult result = try_kinds(context, kinds);
        kinds.fabric = result == CUDA_SUCCESS;
        kinds.reason = kinds.fabric
                           ? std::string("the driver makes fabric handles")
                           : concat("the driver makes no fabric handles here: ", describe(result),
                                    ", as without nvidia-imex or without an IMEX channel in the container");
        if (result == CUDA_ERROR_OUT_OF_MEMORY) {
            throw_no_device_memory(context, who, static_cast<int64_t>(granularity_of(context, kinds)),
                                   result);
        }
        if (kinds.wanted == "fabric" && !kinds.fabric)
            throw_no_fabric(context, who, "the driver makes none (" + describe(result) + ")");
    }
    if (!kinds.posix_fd && !kinds.fabric) {
        throw HeapError(concat(who, " cannot share memory of ", context.name(),
                               ": it can be exported neither as file descriptor nor as fabric handle (",
                               kinds.reason, "); ", kUseCollective, "."));
    }
    if (kinds.posix_fd && !kinds.fabric) {
        const CUresult result = try_kinds(context, kinds);
        if (result == CUDA_ERROR_OUT_OF_MEMORY) {
            throw_no_device_memory(context, who, static_cast<int64_t>(granularity_of(context, kinds)),
                                   result);
        }
        if (result != CUDA_SUCCESS) {
            throw HeapError(concat(who, " may not make memory of ", context.name(),
                                   " that can be shared: ", describe(result), "; ", kUseCollective, "."));
        }
    }
    kinds.granularity = granularity_of(context, kinds);
    return kinds;
}

void throw_no_device_memory(const CudaContext& context, const std::string& who, int64_t bytes,
                            CUresult result) {
    size_t free_bytes = 0, total_bytes = 0;
    context.driver().cuMemGetInfo(&free_bytes, &total_bytes);
    throw HeapError(
        concat(who, " wants ", bytes, " bytes on ", context.name(), " for its window, of which ", free_bytes,
               " of ", total_bytes, " are free: ", describe(result),
               "; lower max_tokens or MOK_ARENA_BYTES, call torch.cuda.empty_cache() first, or end "
               "other processes on this GPU."));
}

CUmemGenericAllocationHandle create_allocation(const CudaContext& context, const ShareKinds& kinds,
                                               const std::string& who, int64_t bytes) {
    const CUmemAllocationProp properties = properties_of(context, kinds.posix_fd, kinds.fabric);
    CUmemGenericAllocationHandle handle = 0;
    const CUresult result = context.driver().cuMemCreate(&handle, static_cast<size_t>(bytes), &properties, 0);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) throw_no_device_memory(context, who, bytes, result);
    if (result != CUDA_SUCCESS) {
        throw HeapError(concat(who, " cannot allocate a window of ", bytes, " bytes on ", context.name(),
                               ": ", describe(result), "; lower max_tokens, or ", kUseCollective, "."));
    }
    return handle;
}

UniqueFd export_fd(const CudaContext& context, CUmemGenericAllocationHandle handle, const std::string& who) {
    int fd = -1;
    const CUresult result = context.driver().cuMemExportToShareableHandle(
        &fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (result != CUDA_SUCCESS) {
        throw HeapError(concat(who, " cannot export its window on ", context.name(),
                               " as a file descriptor: ", describe(result),
                               "; raise the limit of open files (ulimit -n), or ", kUseCollective, "."));
    }
    return UniqueFd(fd);
}

std::string export_fabric(const CudaContext& context, CUmemGenericAllocationHandle handle,
                          const std::string& who) {
    CUmemFabricHandle fabric;
    const CUresult result =
        context.driver().cuMemExportToShareableHandle(&fabric, handle, CU_MEM_HANDLE_TYPE_FABRIC, 0);
    if (result != CUDA_SUCCESS) {
        throw HeapError(concat(who, " cannot export its window on ", context.name(),
                               " as a fabric handle: ", describe(result),
                               "; see whether nvidia-imex runs, or set "
                               "MOK_HEAP_BACKING=posix_fd on all ranks of one machine."));
    }
    std::string text;
    for (unsigned char byte : fabric.data) {
        text += "0123456789abcdef"[byte >> 4];
        text += "0123456789abcdef"[byte & 15];
    }
    return text;
}

CUmemFabricHandle parse_fabric(const std::string& text, const std::string& peer) {
    CUmemFabricHandle handle{};
    const bool whole = text.size() == 2 * sizeof(handle.data) &&
                       text.find_first_not_of("0123456789abcdef") == std::string::npos;
    if (!whole) {
        throw HeapError(concat(peer,
                               " published a fabric handle that cannot be read; install the same mok on "
                               "all ranks."));
    }
    for (size_t i = 0; i < sizeof(handle.data); ++i) {
        handle.data[i] = static_cast<unsigned char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
    }
    return handle;
}

CUresult map_allocation(const CudaContext& context, char* address, int64_t bytes,
                        CUmemGenericAllocationHandle handle) {
    const CudaDriver& driver = context.driver();
    const auto where = reinterpret_cast<CUdeviceptr>(address);
    const auto size = static_cast<size_t>(bytes);
    CUresult result = driver.cuMemMap(where, size, 0, handle, 0);
    if (result != CUDA_SUCCESS) return result;
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = context.device();
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    result = driver.cuMemSetAccess(where, size, &access, 1);
    if (result != CUDA_SUCCESS) driver.cuMemUnmap(where, size);
    return result;
}

void import_allocation(const CudaContext& context, char* address, int64_t bytes, void* shareable,
                       CUmemAllocationHandleType kind, const std::string& who, const std::string& peer) {
    const CudaDriver& driver = context.driver();
    CUmemGenericAllocationHandle handle = 0;
    CUresult result = driver.cuMemImportFromShareableHandle(&handle, shareable, kind);
    if (result != CUDA_SUCCESS) {
        const char* help =
            kind == CU_MEM_HANDLE_TYPE_FABRIC
                ? "see whether nvidia-imex runs on both machines with one configuration, or set "
                  "MOK_HEAP_BACKING=posix_fd if all ranks run on one"
                : "make the GPUs of all ranks visible to every rank (one CUDA_VISIBLE_DEVICES, and "
                  "torch.cuda.set_device), or use backend=\"collective\"";
        throw HeapError(concat(who, " (", context.name(), ") cannot import the window of ", peer, ": ",
                               describe(result), "; ", help, "."));
    }
    result = map_allocation(context, address, bytes, handle);
    driver.cuMemRelease(handle);
    if (result != CUDA_SUCCESS) {
        throw HeapError(concat(who, " (", context.name(), ") cannot map the window of ", peer, ": ",
                               describe(result),
                               "; there is no peer access between the two (see nvidia-smi topo "
                               "-p2p rw) or no room for the mapping: ",
                               kUseCollective, "."));
    }
}

std::vector<int> devices_by_access(const CudaContext& context, bool accessible) {
    std::vector<int> devices;
    for (int other = 0; other < num_cuda_devices(); ++other) {
        CUdevice handle = 0;
        int can = 0;
        if (other == context.ordinal() || context.driver().cuDeviceGet(&handle, other) != CUDA_SUCCESS)
            continue;
        if (context.driver().cuDeviceCanAccessPeer(&can, context.device(), handle) != CUDA_SUCCESS) can = 0;
        if ((can != 0) == accessible) devices.push_back(other);
    }
    return devices;
}

std::string without_class(const std::string& text) {
    const size_t colon = text.find(": ");
    return text.compare(0, 4, "mok.") == 0 && colon != std::string::npos ? text.substr(colon + 2) : text;
}

}  // namespace mok

#endif  // MOK_WITH_CUDA
