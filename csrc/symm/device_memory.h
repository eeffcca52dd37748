// Allocations of CUDA's virtual memory that can be passed to other processes, step by step, each with the
// sentence for its failure. Only for builds with CUDA. The context is current in every call.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "csrc/symm/cuda_driver.h"
#include "csrc/symm/unique_fd.h"

namespace mok {

/// How allocations of one device can be shared.
struct ShareKinds {
    std::string wanted = "auto";
    bool posix_fd = false;
    bool fabric = false;
    size_t granularity = 2 << 20;
    std::string reason;  // for a person: why these
};

/// Asks the device, then the driver by making a small allocation: offering fabric handles and being allowed
/// to make them are two things. `is_shared` is false where no other process needs the memory. Throws
/// HeapError.
ShareKinds choose_kinds(const CudaContext& context, const std::string& who, bool is_shared);

CUmemGenericAllocationHandle create_allocation(const CudaContext& context, const ShareKinds& kinds,
                                               const std::string& who, int64_t bytes);
[[noreturn]] void throw_no_device_memory(const CudaContext& context, const std::string& who, int64_t bytes,
                                         CUresult result);

UniqueFd export_fd(const CudaContext& context, CUmemGenericAllocationHandle handle, const std::string& who);
/// 128 hexadecimal digits.
std::string export_fabric(const CudaContext& context, CUmemGenericAllocationHandle handle,
                          const std::string& who);
CUmemFabricHandle parse_fabric(const std::string& text, const std::string& peer);

/// Maps the allocation for this device to read and write; nothing stays mapped on failure.
CUresult map_allocation(const CudaContext& context, char* address, int64_t bytes,
                        CUmemGenericAllocationHandle handle);
/// Imports and maps a peer's window. `peer` is the peer in words, for the error.
void import_allocation(const CudaContext& context, char* address, int64_t bytes, void* shareable,
                       CUmemAllocationHandleType kind, const std::string& who, const std::string& peer);

/// The other visible devices that this one can, or cannot, access.
std::vector<int> devices_by_access(const CudaContext& context, bool accessible);

/// An error's text without the class name that leads it.
std::string without_class(const std::string& text);

}  // namespace mok
