// The C API's properties of the GPU, or without a GPU.
#include "core/driver.h"
#include "expect_error.h"
#include "nvte/gpu.h"
#include "transformer_engine/transformer_engine.h"
#include "transformer_engine/util/cuda_runtime.h"

namespace {

namespace cuda = transformer_engine::cuda;

TEST(Gpu, TheRuleOfNonTnFp8Gemm) {
  for (int sm : {0, 80, 89, 90, 99, 120, 121, 129})
    EXPECT_FALSE(tea::nvte::has_non_tn_fp8_gemm(sm)) << sm;
  for (int sm : {100, 103, 110, 119, 130, 140})
    EXPECT_TRUE(tea::nvte::has_non_tn_fp8_gemm(sm)) << sm;
}

TEST(Gpu, AnswersFromTheDriver) {
  const std::vector<tea::Device>& gpus = tea::driver::gpus().list;
  EXPECT_NVTE_ERROR(cuda::sm_count(1000), "number of SMs of device 1000: no GPU");
  if (gpus.empty()) {
    EXPECT_EQ(nvte_is_non_tn_fp8_gemm_supported(), 0);
    EXPECT_NVTE_ERROR(cuda::current_device(), "index of device -1: no GPU; there are 0");
    EXPECT_NVTE_ERROR(cuda::sm_arch(), "compute capability of device -1: no GPU");
  } else {
    const tea::Device& current = gpus[static_cast<size_t>(cuda::current_device())];
    EXPECT_EQ(cuda::sm_arch(), current.sm);
    EXPECT_EQ(cuda::sm_count(0), gpus[0].num_sms);
    EXPECT_EQ(nvte_is_non_tn_fp8_gemm_supported(), tea::nvte::has_non_tn_fp8_gemm(current.sm));
  }
}

}  // namespace
