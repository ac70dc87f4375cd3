/* Every value, size and offset of transformer_engine.h that a caller's binary depends on, checked
   by the compiler in C and in C++. */
#ifndef TESTS_INCLUDE_LAYOUT_TRANSFORMER_ENGINE_H_
#define TESTS_INCLUDE_LAYOUT_TRANSFORMER_ENGINE_H_
#include <assert.h>

#include "transformer_engine/transformer_engine.h"

#define EXPECT_VALUE(name, value) static_assert((name) == (value), #name)
#define EXPECT_OFFSET(type, field, value) static_assert(offsetof(type, field) == (value), #field)

EXPECT_VALUE(kNVTEByte, 0);
EXPECT_VALUE(kNVTEInt16, 1);
EXPECT_VALUE(kNVTEInt32, 2);
EXPECT_VALUE(kNVTEInt64, 3);
EXPECT_VALUE(kNVTEFloat32, 4);
EXPECT_VALUE(kNVTEFloat16, 5);
EXPECT_VALUE(kNVTEBFloat16, 6);
EXPECT_VALUE(kNVTEFloat8E4M3, 7);
EXPECT_VALUE(kNVTEFloat8E5M2, 8);
EXPECT_VALUE(kNVTEFloat8E8M0, 9);
EXPECT_VALUE(kNVTEFloat4E2M1, 10);
EXPECT_VALUE(kNVTENumTypes, 11);

EXPECT_VALUE(NVTE_DELAYED_TENSOR_SCALING, 0);
EXPECT_VALUE(NVTE_MXFP8_1D_SCALING, 1);
EXPECT_VALUE(NVTE_BLOCK_SCALING_1D, 2);
EXPECT_VALUE(NVTE_BLOCK_SCALING_2D, 3);
EXPECT_VALUE(NVTE_NVFP4_1D_SCALING, 4);
EXPECT_VALUE(NVTE_INVALID_SCALING, 100);

EXPECT_VALUE(kNVTERowwiseData, 0);
EXPECT_VALUE(kNVTEColumnwiseData, 1);
EXPECT_VALUE(kNVTEScale, 2);
EXPECT_VALUE(kNVTEAmax, 3);
EXPECT_VALUE(kNVTERowwiseScaleInv, 4);
EXPECT_VALUE(kNVTEColumnwiseScaleInv, 5);
EXPECT_VALUE(kNVTEColumnwiseAmax, 6);
EXPECT_VALUE(kNVTEWithGEMMSwizzledScales, 7);
EXPECT_VALUE(kNVTENumTensorParams, 8);

EXPECT_VALUE(sizeof(NVTEDType), 4);
EXPECT_VALUE(sizeof(NVTEScalingMode), 4);
EXPECT_VALUE(sizeof(NVTETensorParam), 4);

EXPECT_VALUE(sizeof(NVTEShape), 128);
EXPECT_OFFSET(NVTEShape, data, 0);
EXPECT_OFFSET(NVTEShape, ndim, 120);

EXPECT_VALUE(sizeof(NVTEBasicTensor), 144);
EXPECT_OFFSET(NVTEBasicTensor, data_ptr, 0);
EXPECT_OFFSET(NVTEBasicTensor, dtype, 8);
EXPECT_OFFSET(NVTEBasicTensor, shape, 16);

EXPECT_VALUE(sizeof(NVTETensor), 8);
EXPECT_VALUE(sizeof(NVTETensorPack), 88);
EXPECT_OFFSET(NVTETensorPack, tensors, 0);
EXPECT_OFFSET(NVTETensorPack, size, 80);

#undef EXPECT_VALUE
#undef EXPECT_OFFSET
#endif
