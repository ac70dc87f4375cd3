// Merging partial results: against softmax over all keys at once, and the cases at infinity.
#include <algorithm>
#include <cmath>
#include <limits>

#include "buffer.h"
#include "ops/merge.h"

namespace tea {
namespace {

constexpr int64_t kBatch = 2, kRows = 3, kHeads = 2, kDim = 5, kKeys = 12;
constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// Scores [batch, rows, heads, keys] and values [keys, dim]; attention over some of the keys.
struct Attention {
  std::vector<double> score, value;

  explicit Attention(std::mt19937_64& random) {
    std::normal_distribution<double> normal(0, 20);
    for (int64_t i = 0; i < kBatch * kRows * kHeads * kKeys; ++i) score.push_back(normal(random));
    for (int64_t i = 0; i < kKeys * kDim; ++i) value.push_back(normal(random) / 20);
  }
  // Writes O [batch, rows, heads, dim] and LSE [batch, heads, rows] over keys [begin, end).
  void run(int64_t begin, int64_t end, Buffer& o, Buffer& lse) const {
    for (int64_t line = 0; line < kBatch * kRows * kHeads; ++line) {
      const double* x = &score[line * kKeys];
      double most = kMinusInfinity, sum = 0;
      for (int64_t k = begin; k < end; ++k) most = std::max(most, x[k]);
      for (int64_t k = begin; k < end; ++k) sum += std::exp(x[k] - most);
      for (int64_t d = 0; d < kDim; ++d) {
        double out = 0;
        for (int64_t k = begin; k < end; ++k)
          out += std::exp(x[k] - most) / sum * value[k * kDim + d];
        o.set(line * kDim + d, out);
      }
      const int64_t b = line / (kRows * kHeads), r = line / kHeads % kRows, h = line % kHeads;
      lse.set((b * kHeads + h) * kRows + r, begin < end ? most + std::log(sum) : kMinusInfinity);
    }
  }
};

struct Part {
  Buffer o, lse;
  explicit Part(int32_t dtype) : Part(dtype, dtype) {}
  Part(int32_t o_dtype, int32_t part_dtype)
      : o(o_dtype, kBatch * kRows * kHeads * kDim),
        lse(part_dtype == TEA_FP64 ? +TEA_FP64 : +TEA_FP32, kBatch * kHeads * kRows) {}
};

struct Pointers {
  std::vector<const void*> o, lse;
};

tea_merge arguments(std::vector<Part>& parts, Part& result, Pointers& pointers) {
  pointers = {};
  for (Part& part : parts) {
    pointers.o.push_back(part.o.data());
    pointers.lse.push_back(part.lse.data());
  }
  tea_merge a{};
  a.struct_size = sizeof a;
  a.part_dtype = parts[0].o.dtype(), a.o_dtype = result.o.dtype();
  a.parts = static_cast<int32_t>(parts.size());
  a.part_o = pointers.o.data(), a.part_lse = pointers.lse.data();
  a.o = result.o.data(), a.lse = result.lse.data();
  a.batch = kBatch, a.rows = kRows, a.heads = kHeads, a.dim = kDim;
  return a;
}

// The parts' own rounding: relative to the largest value, plus that of LSE in the exponent.
void expect_close(const Part& actual, const Part& expected, int32_t part_dtype, double largest) {
  const double unit = rounding_unit(part_dtype) + rounding_unit(actual.o.dtype()) + 60 * 1e-7;
  for (int64_t i = 0; i < actual.o.count(); ++i)
    ASSERT_NEAR(actual.o[i], expected.o[i], 2 * unit * largest) << i;
  for (int64_t i = 0; i < actual.lse.count(); ++i)
    ASSERT_NEAR(actual.lse[i], expected.lse[i], 1e-6 * std::abs(expected.lse[i]) + 1e-6) << i;
}

TEST(Merge, EqualsAttentionOverAllKeys) {
  std::mt19937_64 random(5);
  const Attention attention(random);
  const std::vector<std::vector<int64_t>> splits = {
      {0, 12}, {0, 5, 12}, {0, 1, 1, 7, 12}, {0, 0, 12, 12}};
  for (int32_t part_dtype : kEveryReal)
    for (int32_t o_dtype : kEveryReal)
      for (const std::vector<int64_t>& split : splits) {
        Part expected(TEA_FP64), actual(o_dtype, part_dtype);
        attention.run(0, kKeys, expected.o, expected.lse);
        std::vector<Part> parts;
        for (size_t i = 0; i + 1 < split.size(); ++i) {
          parts.emplace_back(part_dtype);
          attention.run(split[i], split[i + 1], parts.back().o, parts.back().lse);
        }
        Pointers pointers;
        merge_parts(arguments(parts, actual, pointers), {});
        expect_close(actual, expected, part_dtype, 4);
      }
}

TEST(Merge, Fp64PartsKeepFp64) {
  std::mt19937_64 random(9);
  const Attention attention(random);
  Part expected(TEA_FP64), actual(TEA_FP64);
  attention.run(0, kKeys, expected.o, expected.lse);
  std::vector<Part> parts;
  for (const int64_t begin : {0, 6}) {
    parts.emplace_back(TEA_FP64);
    attention.run(begin, begin + 6, parts.back().o, parts.back().lse);
  }
  Pointers pointers;
  merge_parts(arguments(parts, actual, pointers), {});
  for (int64_t i = 0; i < actual.o.count(); ++i)
    ASSERT_NEAR(actual.o[i], expected.o[i], 1e-13) << i;
  for (int64_t i = 0; i < actual.lse.count(); ++i)
    ASSERT_NEAR(actual.lse[i], expected.lse[i], 1e-13) << i;
}

TEST(Merge, StepByStepInPlace) {
  std::mt19937_64 random(6);
  const Attention attention(random);
  Part sum(TEA_FP32), expected(TEA_FP64);
  attention.run(0, 3, sum.o, sum.lse);
  for (int64_t begin = 3; begin < kKeys; begin += 3) {
    std::vector<Part> steps;
    steps.emplace_back(TEA_FP32);
    attention.run(begin, begin + 3, steps[0].o, steps[0].lse);
    Pointers pointers;
    tea_merge a = arguments(steps, sum, pointers);
    const void* o[2] = {sum.o.data(), pointers.o[0]};
    const void* lse[2] = {sum.lse.data(), pointers.lse[0]};
    a.parts = 2, a.part_o = o, a.part_lse = lse, a.o_dtype = 0;
    merge_parts(a, {});
  }
  attention.run(0, kKeys, expected.o, expected.lse);
  expect_close(sum, expected, TEA_FP32, 4);
}

TEST(Merge, EmptyPartsAddNothingEvenIfTheyHoldNan) {
  std::mt19937_64 random(7);
  const Attention attention(random);
  std::vector<Part> parts;
  for (int i = 0; i < 3; ++i) parts.emplace_back(TEA_BF16);  // O is NaN everywhere
  for (Part& part : parts)
    for (int64_t i = 0; i < part.lse.count(); ++i) part.lse.set(i, kMinusInfinity);
  Part empty(TEA_BF16), actual(TEA_BF16), expected(TEA_BF16);
  Pointers pointers;
  merge_parts(arguments(parts, empty, pointers), {});
  for (int64_t i = 0; i < empty.o.count(); ++i) EXPECT_EQ(empty.o[i], 0);
  for (int64_t i = 0; i < empty.lse.count(); ++i) EXPECT_EQ(empty.lse[i], kMinusInfinity);

  attention.run(0, kKeys, parts[1].o, parts[1].lse);
  attention.run(0, kKeys, expected.o, expected.lse);
  merge_parts(arguments(parts, actual, pointers), {});
  EXPECT_TRUE(actual.o == expected.o);  // one part alone comes back exactly
  EXPECT_TRUE(actual.lse == expected.lse);
}

TEST(Merge, Strides) {
  std::mt19937_64 random(8);
  const Attention attention(random);
  std::vector<Part> parts;
  parts.emplace_back(TEA_FP32);
  attention.run(0, kKeys, parts[0].o, parts[0].lse);
  Part actual(TEA_FP32);
  Pointers pointers;
  tea_merge a = arguments(parts, actual, pointers);
  a.o_stride = {kHeads * kRows * kDim, kDim, kRows * kDim};  // bhsd
  a.lse_stride = {kRows * kHeads, kHeads, 1};                // bsh
  merge_parts(a, {});
  for (int64_t b = 0; b < kBatch; ++b)
    for (int64_t r = 0; r < kRows; ++r)
      for (int64_t h = 0; h < kHeads; ++h) {
        EXPECT_EQ(actual.lse[(b * kRows + r) * kHeads + h],
                  parts[0].lse[(b * kHeads + h) * kRows + r]);
        for (int64_t d = 0; d < kDim; ++d)
          EXPECT_EQ(actual.o[((b * kHeads + h) * kRows + r) * kDim + d],
                    parts[0].o[((b * kRows + r) * kHeads + h) * kDim + d]);
      }
}

TEST(Merge, NamesWhatIsWrong) {
  std::vector<Part> parts;
  parts.emplace_back(TEA_FP16);
  Part result(TEA_FP16);
  const auto error = [&](auto change) {
    Pointers pointers;
    tea_merge a = arguments(parts, result, pointers);
    change(a, pointers);
    return error_of([&] { merge_parts(a, {}); });
  };
  EXPECT_EQ(error([](auto& a, auto&) { a.part_dtype = TEA_E4M3; }),
            "part_dtype is e4m3; needs one of fp16, bf16, fp32, fp64");
  EXPECT_EQ(error([](auto& a, auto&) { a.o_dtype = TEA_E5M2; }),
            "o_dtype is e5m2; needs one of fp16, bf16, fp32, fp64");
  EXPECT_EQ(error([](auto& a, auto&) { a.parts = 0; }), "parts is 0; needs 1 or more");
  EXPECT_EQ(error([](auto&, auto& p) { p.lse[0] = nullptr; }), "part_lse[0] is NULL; needs memory");
  EXPECT_EQ(error([](auto&, auto& p) { p.o[0] = nullptr; }), "part_o[0] is NULL; needs memory");
  EXPECT_EQ(error([](auto& a, auto&) { a.o = nullptr; }), "o is NULL; needs memory");
  EXPECT_EQ(error([](auto& a, auto&) { a.lse_stride.head = -2; }),
            "lse_stride is -2; needs 0 or more elements");
}

}  // namespace
}  // namespace tea
