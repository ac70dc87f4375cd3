// What the C API says of a GPU that is not there.
#include "expect_error.h"
#include "nvte/gpu.h"
#include "transformer_engine/cudnn.h"
#include "transformer_engine/util/cuda_runtime.h"

namespace {

namespace cuda = transformer_engine::cuda;

TEST(Gpu, TheRuleOfNonTnFp8Gemm) {
  for (int sm : {0, 80, 89, 90, 99, 120, 121, 129})
    EXPECT_FALSE(tea::nvte::has_non_tn_fp8_gemm(sm)) << sm;
  for (int sm : {100, 103, 110, 119, 130, 140})
    EXPECT_TRUE(tea::nvte::has_non_tn_fp8_gemm(sm)) << sm;
}

TEST(Gpu, NoneIsThere) {
  EXPECT_EQ(nvte_is_non_tn_fp8_gemm_supported(), 0);
  EXPECT_NVTE_ERROR(cuda::current_device(), "no GPU");
  EXPECT_NVTE_ERROR(cuda::sm_arch(), "compute capability of device -1: no GPU");
  EXPECT_NVTE_ERROR(cuda::sm_count(2), "number of multiprocessors of device 2: no GPU");
}

TEST(Gpu, CudnnNeedsNoHandle) { EXPECT_NO_THROW(transformer_engine::nvte_cudnn_handle_init()); }

}  // namespace
