// The supporting operations on a GPU: the same results as on the host for random draws; their
// errors; and tensors of more than 2^31 elements, whose last elements are checked.
#include <gtest/gtest.h>

#include <cmath>

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

TEST(Sanitized, SupportingOperations) {
  for (const OpCase& c : kOpCases)
    for (uint64_t seed : {2, 4, 8}) EXPECT_EQ(host_and_gpu(c, seed), "");  // even ones: no graph
}

TEST(Races, SupportingOperations) {
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
  const std::vector<const void*> o(121, memory), lse(121, memory);
  tea_merge merge{};
  merge.struct_size = sizeof merge;
  merge.part_dtype = TEA_FP16, merge.parts = 121, merge.part_o = o.data();
  merge.part_lse = lse.data(), merge.o = memory;
  merge.batch = merge.rows = merge.heads = merge.dim = 1;
  EXPECT_EQ(tea_merge_parts(&merge, 0, gpu.stream()), TEA_INVALID);
  EXPECT_EQ(std::string(tea_error()), "parts is 121; needs at most 120 on a GPU");
  EXPECT_EQ(tea_fill(memory, TEA_FP32, 1, 0, 1 << 20, nullptr), TEA_UNSUPPORTED);
}

std::vector<uint8_t> fetched(Gpu& gpu, const uint8_t* from, size_t bytes) {
  std::vector<uint8_t> got(bytes);
  gpu.download(got.data(), const_cast<uint8_t*>(from), bytes);
  gpu.wait();
  return got;
}

// Three tensors under one scale, of so many elements that a CTA finds the maximum of several parts.
class JointCast {
 public:
  static constexpr int64_t kCount[] = {9'000'000, 3'000'016, 1'234'567}, kAll = 14'000'000;
  static constexpr size_t kNumbers = 8 + TEA_FP8_MAXIMA;  // scale, scale_inv, amax, and maxima

  // Memory of bf16 elements, of codes, and of numbers.
  explicit JointCast(uint8_t* memory) : wide_(memory), narrow_(memory + 2 * kAll) {}
  static constexpr size_t kBytes = 3 * size_t{kAll} + sizeof(float) * kNumbers;
  uint8_t* numbers() const { return narrow_ + kAll; }
  uint8_t* codes() const { return narrow_; }

  tea_fp8_joint_cast arguments(bool to_fp8, bool current) const {
    tea_fp8_joint_cast a{};
    a.struct_size = sizeof a, a.tensors = 3;
    a.input_dtype = to_fp8 ? TEA_BF16 : TEA_E4M3, a.output_dtype = to_fp8 ? TEA_E4M3 : TEA_BF16;
    auto* const number = reinterpret_cast<float*>(numbers());
    a.scale_inv = number + 1;
    if (to_fp8) a.scale = number, a.amax = number + 2;
    if (current) a.maxima = number + 8;
    int64_t at = 0;
    for (int i = 0; i < 3; ++i) {
      uint8_t *const wide = wide_ + 2 * at, *const narrow = narrow_ + at;
      a.input[i] = to_fp8 ? wide : narrow, a.output[i] = to_fp8 ? narrow : wide;
      a.count[i] = kCount[i];
      at += kCount[i] + (16 - kCount[i] % 16) % 16;
    }
    return a;
  }

 private:
  uint8_t *wide_, *narrow_;
};

// Numbers from 0.5 to 2 of both signs; the largest magnitude of all ends the second tensor.
std::vector<uint8_t> numbers_to_cast() {
  std::vector<uint8_t> host(JointCast::kBytes);
  auto* const number = reinterpret_cast<uint16_t*>(host.data());
  uint32_t random = 1;
  for (int64_t i = 0; i < JointCast::kAll; ++i) {
    random = random * 1664525 + 1013904223;
    number[i] = static_cast<uint16_t>(0x3F80 ^ (random >> 16 & 0x80FF));
  }
  number[JointCast::kCount[0] + JointCast::kCount[1] - 1] = 0xC240;  // -48
  const float scale = 100;
  std::memcpy(JointCast(host.data()).numbers(), &scale, sizeof scale);
  return host;
}

TEST(Ops, JointCastsOfManyElements) {
  Gpu& gpu = gpu_of_thread(0);
  uint8_t* const memory = gpu.scratch(JointCast::kBytes);
  for (const bool current : {false, true}) {
    std::vector<uint8_t> host = numbers_to_cast();
    gpu.upload(memory, host.data(), host.size());
    const JointCast here(host.data()), there(memory);
    const auto quantize = current ? tea_fp8_quantize_joint_current : tea_fp8_quantize_joint;
    const tea_fp8_joint_cast a = here.arguments(true, current), b = there.arguments(true, current);
    ASSERT_EQ(quantize(&a, -1, nullptr), TEA_OK) << tea_error();
    ASSERT_EQ(quantize(&b, 0, gpu.stream()), TEA_OK) << tea_error();
    EXPECT_EQ(*a.amax, 48);
    const std::vector<uint8_t> cast = fetched(gpu, memory, JointCast::kBytes);
    const auto offset = [&](const uint8_t* of) { return of - host.data(); };
    const auto end = offset(here.numbers()) + 12;  // scale, scale_inv and amax
    EXPECT_TRUE(std::equal(host.begin() + offset(here.codes()), host.begin() + end,
                           cast.begin() + offset(here.codes())));
    const tea_fp8_joint_cast c = here.arguments(false, false), d = there.arguments(false, false);
    ASSERT_EQ(tea_fp8_dequantize_joint(&c, -1, nullptr), TEA_OK) << tea_error();
    ASSERT_EQ(tea_fp8_dequantize_joint(&d, 0, gpu.stream()), TEA_OK) << tea_error();
    const std::vector<uint8_t> back = fetched(gpu, memory, JointCast::kBytes);
    EXPECT_TRUE(std::equal(host.begin(), host.begin() + end, back.begin()));
  }
}

// Long causal rows, so many that every block has several: what a row does not see is NaN.
class LongCausalRows {
 public:
  static constexpr int64_t kCols = 8192, kRows = 2600;
  static constexpr uint16_t kNan = 0x7FC0, kOne = 0x3F80, kHalf = 0x3F00;

  explicit LongCausalRows(Gpu& gpu) : gpu_(gpu), first_(gpu.scratch(3 * kBytes)) {}
  // Row r sees columns 0 .. r; fill(row, r) writes them.
  template <class Fill>
  uint8_t* tensor(int place, const Fill& fill) {
    std::vector<uint16_t> all(kRows * kCols, kNan);
    for (int64_t r = 0; r < kRows; ++r) fill(&all[static_cast<size_t>(r * kCols)], r);
    uint8_t* const to = first_ + place * kBytes;
    gpu_.upload(to, reinterpret_cast<const uint8_t*>(all.data()), kBytes);
    gpu_.wait();
    return to;
  }
  std::vector<uint16_t> fetched(uint8_t* from) {
    std::vector<uint16_t> got(kRows * kCols);
    gpu_.download(reinterpret_cast<uint8_t*>(got.data()), from, kBytes);
    gpu_.wait();
    return got;
  }
  uint8_t* place(int i) const { return first_ + i * kBytes; }
  tea_scaled_softmax arguments() const {
    tea_scaled_softmax a{};
    a.struct_size = sizeof a;
    a.dtype = TEA_BF16, a.kind = TEA_SCORE_MASK_CAUSAL, a.scale = 1;
    a.batch = a.heads = 1, a.rows = kRows, a.cols = kCols;
    return a;
  }
  static float value(uint16_t bits) {
    const uint32_t wide = uint32_t{bits} << 16;
    float x;
    std::memcpy(&x, &wide, 4);
    return x;
  }

 private:
  static constexpr size_t kBytes = size_t{2} * kRows * kCols;
  Gpu& gpu_;
  uint8_t* first_;
};

TEST(Ops, LongCausalRowsForward) {
  Gpu& gpu = gpu_of_thread(0);
  LongCausalRows rows(gpu);
  tea_scaled_softmax a = rows.arguments();
  a.input = rows.tensor(0, [](uint16_t* row, int64_t r) {
    std::fill_n(row, r + 1, uint16_t{0});
    row[r / 2] = 0x4100;  // 8
  });
  for (const int place : {1, 0}) {
    a.output = rows.place(place);
    ASSERT_EQ(tea_scaled_softmax_forward(&a, 0, gpu.stream()), TEA_OK) << tea_error();
    const std::vector<uint16_t> got = rows.fetched(rows.place(place));
    for (int64_t r = 0; r < rows.kRows; ++r) {
      const double most = std::exp(8.0), sum = most + static_cast<double>(r);
      for (int64_t c = 0; c < rows.kCols; ++c) {
        const double expected = c > r ? 0 : (c == r / 2 ? most : 1) / sum;
        ASSERT_NEAR(rows.value(got[static_cast<size_t>(r * rows.kCols + c)]), expected,
                    expected * 0x1p-8)
            << r << " " << c;
      }
    }
  }
}

TEST(Ops, LongCausalRowsBackward) {
  Gpu& gpu = gpu_of_thread(0);
  LongCausalRows rows(gpu);
  tea_scaled_softmax a = rows.arguments();
  a.input = rows.tensor(0, [&](uint16_t* row, int64_t r) {
    std::fill_n(row, r + 1, uint16_t{0});
    row[r] = row[r / 2] = rows.kHalf;
  });
  a.dout = rows.tensor(1, [&](uint16_t* row, int64_t r) {
    std::fill_n(row, r + 1, uint16_t{0});
    row[r] = static_cast<uint16_t>(rows.kOne + r % 64);
  });
  for (const int place : {2, 1}) {
    a.output = rows.place(place);
    ASSERT_EQ(tea_scaled_softmax_backward(&a, 0, gpu.stream()), TEA_OK) << tea_error();
    const std::vector<uint16_t> got = rows.fetched(rows.place(place));
    for (int64_t r = 1; r < rows.kRows; ++r)
      for (int64_t c = 0; c < rows.kCols; ++c) {
        const float quarter = rows.value(static_cast<uint16_t>(rows.kOne + r % 64)) / 4;
        ASSERT_EQ(rows.value(got[static_cast<size_t>(r * rows.kCols + c)]), c == r       ? quarter
                                                                            : c == r / 2 ? -quarter
                                                                                         : 0)
            << r << " " << c;
      }
  }
}

// ---- More than 2^31 elements
// ---------------------------------------------------------------------

constexpr int64_t kMany = (int64_t{1} << 31) + 4096;
constexpr size_t kMemory = size_t{7} << 30;

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
