// The neighbours of attention on a GPU: the same results as on the host, draw by draw; errors of
// their own; and tensors of more than 2^31 elements, whose last ones are looked at.
#include <gtest/gtest.h>

#include "ops_cases.h"

namespace tea::kit {
namespace {

TEST(Ops, AsOnTheHost) {
  for (const OpCase& c : kOpCases)
    for (uint64_t seed = 1; seed <= 200; ++seed)
      if (const std::string found = host_and_gpu(c, seed); !found.empty()) {
        ADD_FAILURE() << found;
        break;
      }
}

TEST(Sanitized, NeighboursOfAttention) {
  for (const OpCase& c : kOpCases)
    for (uint64_t seed : {2, 4, 8}) EXPECT_EQ(host_and_gpu(c, seed), "");  // even ones: no graph
}

TEST(Races, NeighboursOfAttention) {
  for (const OpCase& c : kOpCases) EXPECT_EQ(host_and_gpu(c, 2), "");
}

TEST(Ops, NamesWhatAGpuCannotDo) {
  Gpu& gpu = gpu_of_thread(0);
  uint8_t* const memory = gpu.scratch(4096);
  tea_fp8_cast cast{};
  cast.struct_size = sizeof cast;
  cast.input_dtype = TEA_FP32, cast.output_dtype = TEA_E4M3;
  EXPECT_EQ(tea_fp8_quantize_current(&cast, 0, gpu.stream()), TEA_INVALID);
  EXPECT_EQ(std::string(tea_error()),
            "amax is NULL; needs memory: a GPU keeps the maximum there between two kernels");
  const std::vector<const void*> o(121, memory);
  const std::vector<const float*> lse(121, reinterpret_cast<float*>(memory));
  tea_merge merge{};
  merge.struct_size = sizeof merge;
  merge.part_dtype = TEA_FP16, merge.parts = 121, merge.part_o = o.data();
  merge.part_lse = lse.data(), merge.o = memory;
  merge.batch = merge.rows = merge.heads = merge.dim = 1;
  EXPECT_EQ(tea_merge_parts(&merge, 0, gpu.stream()), TEA_INVALID);
  EXPECT_EQ(std::string(tea_error()), "parts is 121; needs at most 120 on a GPU");
  EXPECT_EQ(tea_fill(memory, TEA_FP32, 1, 0, 1 << 20, nullptr), TEA_UNSUPPORTED);
}

// ---- More than 2^31 elements
// ---------------------------------------------------------------------

constexpr int64_t kMany = (int64_t{1} << 31) + 4096;
constexpr size_t kMemory = size_t{7} << 30;

std::vector<uint8_t> fetched(Gpu& gpu, const uint8_t* from, size_t bytes) {
  std::vector<uint8_t> got(bytes);
  gpu.download(got.data(), const_cast<uint8_t*>(from), bytes);
  gpu.wait();
  return got;
}

TEST(OpsLarge, Fills) {
  Gpu& gpu = gpu_of_thread(0);
  uint8_t* const memory = gpu.scratch(kMemory);
  gpu.fill(memory + kMany - 4096, ~0u, 8192);
  ASSERT_EQ(tea_fill(memory + 1, TEA_E4M3, kMany, 1, 0, gpu.stream()), TEA_OK) << tea_error();
  const std::vector<uint8_t> got = fetched(gpu, memory + kMany - 8, 16);
  for (int i = 0; i < 16; ++i) EXPECT_EQ(got[i], i <= 8 ? 0x38 : 0xFF) << i;
}

TEST(OpsLarge, Moves) {
  Gpu& gpu = gpu_of_thread(0);
  constexpr int64_t kRow = 4096, kTokens = kMany / kRow;
  uint8_t* const input = gpu.scratch(kMemory);
  uint8_t* const output = input + kMany;
  auto* const cu = reinterpret_cast<int32_t*>(output + kMany);
  gpu.fill(input, 0, kMany), gpu.fill(output, ~0u, kMany);
  gpu.fill(input + kMany - kRow, 0x04030201, kRow);
  const int32_t lengths[] = {5, static_cast<int32_t>(kTokens)};
  gpu.upload(reinterpret_cast<uint8_t*>(cu), reinterpret_cast<const uint8_t*>(lengths), 8);
  tea_thd_convert a{};
  a.struct_size = sizeof a;
  a.dtype = TEA_E4M3, a.input = input, a.output = output, a.cu_seqlens = cu;
  a.batch = 1, a.seqlen = a.tokens = kTokens, a.heads = 1, a.dim = kRow;
  ASSERT_EQ(tea_thd_to_bshd(&a, 0, gpu.stream()), TEA_OK) << tea_error();
  const std::vector<uint8_t> got = fetched(gpu, output + (kTokens - 6) * kRow, kRow);
  for (int64_t i = 0; i < kRow; ++i) ASSERT_EQ(got[static_cast<size_t>(i)], i % 4 + 1);
}

TEST(OpsLarge, CastsAndMaxima) {
  Gpu& gpu = gpu_of_thread(0);
  uint8_t* const narrow = gpu.scratch(kMemory);
  uint8_t* const wide = narrow + kMany;
  auto* const amax = reinterpret_cast<float*>(wide + 2 * kMany);
  gpu.fill(narrow, 0x38383838, kMany);  // ones
  gpu.fill(narrow + kMany - 4, 0x40383838, 4);
  gpu.fill(reinterpret_cast<uint8_t*>(amax), 0, 4);
  tea_fp8_cast a{};
  a.struct_size = sizeof a;
  a.input_dtype = TEA_E4M3, a.output_dtype = TEA_BF16, a.count = kMany;
  a.input = narrow, a.output = wide;
  ASSERT_EQ(tea_fp8_dequantize(&a, 0, gpu.stream()), TEA_OK) << tea_error();
  ASSERT_EQ(tea_amax(wide, TEA_BF16, kMany, amax, 0, gpu.stream()), TEA_OK) << tea_error();
  float most = 0;
  std::memcpy(&most, fetched(gpu, reinterpret_cast<uint8_t*>(amax), 4).data(), 4);
  EXPECT_EQ(most, 2);
  const std::vector<uint8_t> got = fetched(gpu, wide + 2 * kMany - 4, 4);
  EXPECT_EQ(got, (std::vector<uint8_t>{0x80, 0x3F, 0x00, 0x40}));
}

TEST(OpsLarge, Softmax) {
  Gpu& gpu = gpu_of_thread(0);
  uint8_t* const scores = gpu.scratch(kMemory);
  constexpr int64_t kCols = 4096;
  gpu.fill(scores, 0, 2 * kMany);
  tea_scaled_softmax a{};
  a.struct_size = sizeof a;
  a.dtype = TEA_BF16, a.scale = 1, a.input = scores, a.output = scores;
  a.batch = 1, a.heads = kMany / kCols, a.rows = 1, a.cols = kCols;
  ASSERT_EQ(tea_scaled_softmax_forward(&a, 0, gpu.stream()), TEA_OK) << tea_error();
  const std::vector<uint8_t> got = fetched(gpu, scores + 2 * kMany - 4, 4);
  EXPECT_EQ(got, (std::vector<uint8_t>{0x80, 0x39, 0x80, 0x39}));  // 2^-12
}

}  // namespace
}  // namespace tea::kit
