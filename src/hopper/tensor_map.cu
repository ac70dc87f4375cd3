#include <cuda.h>
#include <cuda_runtime.h>

#include "hopper/tensor_map.h"

namespace tea::hopper {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encoder() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t code = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000,
                                                            cudaEnableDefault, &found);
  const bool ok = code == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return ok ? reinterpret_cast<Encode>(entry) : nullptr;
}

CUtensorMapDataType data_type(Type t) {
  switch (t) {
    case Type::kBf16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case Type::kFp16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case Type::kFp32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  }
}

CUtensorMapSwizzle swizzle_mode(Swizzle s) {
  switch (s) {
    case Swizzle::k128:
      return CU_TENSOR_MAP_SWIZZLE_128B;
    case Swizzle::k64:
      return CU_TENSOR_MAP_SWIZZLE_64B;
    case Swizzle::k32:
      return CU_TENSOR_MAP_SWIZZLE_32B;
    default:
      return CU_TENSOR_MAP_SWIZZLE_NONE;
  }
}

}  // namespace

int encode(TensorMap* map, const void* base, const MapShape& shape) {
  static const Encode encoder = find_encoder();
  if (!encoder) return CUDA_ERROR_NOT_FOUND;
  static_assert(sizeof(TensorMap) == sizeof(CUtensorMap));
  const cuuint32_t every_element[5] = {1, 1, 1, 1, 1};
  return encoder(reinterpret_cast<CUtensorMap*>(map), data_type(shape.type), shape.rank,
                 const_cast<void*>(base), shape.extent, shape.stride + 1, shape.box, every_element,
                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_mode(shape.swizzle),
                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace tea::hopper
