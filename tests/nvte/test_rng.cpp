// The helpers whose handles are raw pointers.
#include <gtest/gtest.h>

#include <thread>

#include "nvte/expect_error.h"
#include "transformer_engine/fused_attn.h"

namespace {

TEST(Rng, ExtractTakesValuesUnlessCaptured) {
  int64_t state[2] = {}, seed = 5, offset = (int64_t{1} << 40) + 7;
  // The unused pointers of a state that was not captured are garbage.
  auto* const garbage = reinterpret_cast<int64_t*>(uintptr_t{8});
  nvte_extract_seed_and_offset(state, 0, garbage, ~uint64_t{0}, garbage, 12, 99, nullptr);
  EXPECT_EQ(state[0], -1);
  EXPECT_EQ(state[1], 12);
  nvte_extract_seed_and_offset(state, 1, &seed, 1, &offset, 2, 3, nullptr);
  EXPECT_EQ(state[0], 5);
  EXPECT_EQ(state[1], (int64_t{1} << 40) + 10);
  EXPECT_NVTE_ERROR(nvte_extract_seed_and_offset(nullptr, 0, nullptr, 1, nullptr, 2, 3, nullptr),
                    "rng_state_ptr is NULL; needs memory");
  EXPECT_NVTE_ERROR(nvte_extract_seed_and_offset(state, 1, nullptr, 1, nullptr, 2, 3, nullptr),
                    "seed_ptr is NULL; needs memory");
}

TEST(Rng, TheCounterBelongsToTheThreadAndAdvancesByBackend) {
  std::thread([] {
    int64_t state[2] = {}, seed = 42;
    const auto next = [&](size_t q, size_t kv, NVTE_Fused_Attn_Backend backend) {
      nvte_populate_rng_state_async(state, &seed, q, kv, backend, nullptr);
      EXPECT_EQ(state[0], 42);
      return state[1];
    };
    EXPECT_EQ(next(100, 100, NVTE_F16_arbitrary_seqlen), 0);
    EXPECT_EQ(next(128, 3, NVTE_F16_max512_seqlen), 16);
    EXPECT_EQ(next(43, 3, NVTE_FP8), 19);  // ceil(129 / 128) = 2
    EXPECT_EQ(next(1, 1, NVTE_No_Backend), 21);
    EXPECT_EQ(next(1, 1, NVTE_F16_arbitrary_seqlen), 22);
    std::thread([&] {
      int64_t other[2] = {};
      nvte_populate_rng_state_async(other, &seed, 1, 1, NVTE_FP8, nullptr);
      EXPECT_EQ(other[1], 0);
    }).join();
  }).join();
  EXPECT_NVTE_ERROR(nvte_populate_rng_state_async(nullptr, nullptr, 1, 1, NVTE_FP8, nullptr),
                    "rng_state_dst is NULL; needs memory");
}

TEST(Rng, SegmentsAreThePositiveEntries) {
  int32_t lengths[] = {0, 3, 0, -1, 7, 9, 5}, scratch = 0;
  EXPECT_EQ(nvte_get_runtime_num_segments(lengths, &scratch, 6, nullptr), 3u);
  EXPECT_EQ(nvte_get_runtime_num_segments(lengths, &scratch, 0, nullptr), 0u);
  EXPECT_NVTE_ERROR(nvte_get_runtime_num_segments(nullptr, &scratch, 6, nullptr),
                    "cu_seqlens is NULL; needs memory");
}

}  // namespace
