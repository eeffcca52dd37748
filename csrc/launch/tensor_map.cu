#include <cuda_runtime.h>

#include "csrc/launch/error.h"
#include "csrc/launch/tensor_map.h"
#include "csrc/layout/check.h"

namespace mok::launch {

namespace {

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                                 CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                 CUtensorMapFloatOOBfill);

EncodeTiled find_encoder() {
    constexpr unsigned int kSinceCuda = 12000;
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSinceCuda,
                                                cudaEnableDefault, &found),
               "cuTensorMapEncodeTiled");
    if (found != cudaDriverEntryPointSuccess || function == nullptr) {
        throw CudaError(
            "the NVIDIA driver has no cuTensorMapEncodeTiled: install a driver for CUDA 12.0 or newer.");
    }
    return reinterpret_cast<EncodeTiled>(function);
}

}  // namespace

CUtensorMap make_tensor_map(const TensorMapSpec& spec) {
    static const EncodeTiled encode = find_encoder();
    const cuuint32_t element_strides[3] = {1, 1, 1};
    CUtensorMap map;
    const CUresult result = encode(&map, spec.dtype, spec.rank, spec.base, spec.sizes, spec.stride_bytes,
                                   spec.box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, spec.swizzle,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        throw CudaError(concat("cuTensorMapEncodeTiled refused (error ", static_cast<int>(result),
                               ") a tensor of ", spec.rank, " dimensions at ", spec.base, ", sizes ",
                               spec.sizes[0], " x ", spec.sizes[1], ", row stride ", spec.stride_bytes[0],
                               " bytes, box ", spec.box[0], " x ", spec.box[1], ", ", spec.element_bytes,
                               " bytes an element."));
    }
    return map;
}

}  // namespace mok::launch
