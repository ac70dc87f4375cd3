// The behaviour of the nvte functions with a GPU and its memory, on a machine without one: with a
// driver that has one. The driver describes it once in a process, so that other GPUs are those of
// children.
#include <gtest/gtest.h>

#include <cstdlib>

#include "nvte/expect_error.h"
#include "nvte/fake_driver.h"
#include "transformer_engine/cudnn.h"
#include "transformer_engine/fused_attn.h"

namespace tea::test {
namespace {

// The driver is in use in this process, by somebody else.
int64_t* memory_of_gpu() {
  fake_gpu(90, 1, 1);
  return reinterpret_cast<int64_t*>(fake_gpu_memory());
}

TEST(FakeGpu, RandomStateAndItsSourcesLieOnOneSide) {
  int64_t host[2] = {5, 6};
  int64_t* const gpu = memory_of_gpu();
  EXPECT_NVTE_ERROR(nvte_extract_seed_and_offset(host, 1, gpu, 0, host, 0, 0, nullptr),
                    "seed_ptr on device is 0; needs the device of rng_state_ptr, -1");
  EXPECT_NVTE_ERROR(nvte_extract_seed_and_offset(host, 1, host, 0, gpu, 0, 0, nullptr),
                    "offset_ptr on device is 0; needs the device of rng_state_ptr, -1");
  EXPECT_NVTE_ERROR(nvte_extract_seed_and_offset(gpu, 1, host, 0, gpu, 0, 0, nullptr),
                    "seed_ptr on device is -1; needs the device of rng_state_ptr, 0");
  EXPECT_NVTE_ERROR(
      nvte_populate_rng_state_async(host, gpu, 1, 1, NVTE_F16_arbitrary_seqlen, nullptr),
      "seed on device is 0; needs the device of rng_state_dst, -1");
  // Memory that is not read may have any address.
  nvte_extract_seed_and_offset(host, 0, gpu, 7, gpu, 8, 0, nullptr);
  EXPECT_EQ(host[0], 7);
  EXPECT_EQ(host[1], 8);
}

TEST(FakeGpu, SegmentsAndTheirScratchLieOnOneSide) {
  int32_t host[4] = {1, 2, 0, 3};
  auto* const gpu = reinterpret_cast<int32_t*>(memory_of_gpu());
  EXPECT_NVTE_ERROR(nvte_get_runtime_num_segments(host, gpu, 4, nullptr),
                    "workspace on device is 0; needs the device of cu_seqlens, -1");
  EXPECT_NVTE_ERROR(nvte_get_runtime_num_segments(gpu, host, 4, nullptr),
                    "workspace on device is -1; needs the device of cu_seqlens, 0");
}

// The selector's answer in a process with that GPU.
void expect_backend(int sm, bool current, bool used, NVTE_Fused_Attn_Backend backend) {
  EXPECT_EXIT(
      {
        fake_gpu(sm, current, used);
        const auto answer = nvte_get_fused_attn_backend(
            false, kNVTEBFloat16, kNVTEBFloat16, NVTE_BSHD_BSHD_BSHD, NVTE_NO_BIAS, NVTE_NO_MASK,
            NVTE_VANILLA_SOFTMAX, 0, 8, 8, 128, 128, 64, 64, -1, -1, false, false, false);
        std::exit(answer == backend ? 0 : 1);
      },
      testing::ExitedWithCode(0), "")
      << "sm " << sm << " current " << current << " used " << used;
}

TEST(FakeGpu, TheSelectorPromisesNothingOnGpusThatNothingRunsOn) {
#if defined(TE_ATTENTION_CUDA)
  constexpr auto kOnNewer = NVTE_F16_arbitrary_seqlen;
#else
  constexpr auto kOnNewer = NVTE_No_Backend;
#endif
  expect_backend(75, true, true, NVTE_No_Backend);
  expect_backend(75, false, true,
                 NVTE_No_Backend);  // of another thread: the runtime's first device
  expect_backend(80, true, true, kOnNewer);
  expect_backend(90, false, true, kOnNewer);
  expect_backend(100, true, false, kOnNewer);  // a context that is not the primary one
  // A machine with a GPU that this process does not use.
  expect_backend(75, false, false, NVTE_F16_arbitrary_seqlen);
  expect_backend(90, false, false, NVTE_F16_arbitrary_seqlen);
}

TEST(FakeGpu, CudnnNeedsNoHandle) {
  const int before = fake_gpu_calls();
  transformer_engine::nvte_cudnn_handle_init();
  EXPECT_EQ(fake_gpu_calls(), before);
}

}  // namespace
}  // namespace tea::test
