#include <cuda.h>
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

CUtensorMapDataType data_type(TensorType type) {
    switch (type) {
        case TensorType::kUint8:
            return CU_TENSOR_MAP_DATA_TYPE_UINT8;
        case TensorType::kBFloat16:
            return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
        case TensorType::kFloat32:
            return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    }
    __builtin_unreachable();
}

}  // namespace

ptx::TensorMap make_tensor_map(const TensorMapSpec& spec) {
    static const EncodeTiled encode = find_encoder();
    static_assert(static_cast<int>(TensorSwizzle::k32B) == CU_TENSOR_MAP_SWIZZLE_32B &&
                  static_cast<int>(TensorSwizzle::k64B) == CU_TENSOR_MAP_SWIZZLE_64B &&
                  static_cast<int>(TensorSwizzle::k128B) == CU_TENSOR_MAP_SWIZZLE_128B);
    check_tensor_map(spec);
    const cuuint64_t* sizes = reinterpret_cast<const cuuint64_t*>(spec.sizes);
    const cuuint64_t* strides = reinterpret_cast<const cuuint64_t*>(spec.stride_bytes);
    const cuuint32_t element_strides[kMaxTensorRank] = {1, 1, 1, 1, 1};
    ptx::TensorMap map;
    const CUresult result =
        encode(&map, data_type(spec.type), spec.rank, spec.base, sizes, strides, spec.box, element_strides,
               CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(spec.swizzle),
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
        throw CudaError(concat("cuTensorMapEncodeTiled refused (error ", static_cast<int>(result),
                               ") a tensor of ", spec.rank, " dimensions at ", spec.base, ", sizes ",
                               spec.sizes[0], " x ", spec.sizes[1], ", row stride ", spec.stride_bytes[0],
                               " bytes, box ", spec.box[0], " x ", spec.box[1], ", ",
                               element_bytes(spec.type), " bytes an element."));
    }
    return map;
}

}  // namespace mok::launch
