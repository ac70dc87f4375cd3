// Halves of sequences and corrections of partial results, against the index formulas.
#include <cmath>
#include <limits>

#include "buffer.h"
#include "ops/context_parallel.h"

namespace tea {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();
constexpr int64_t kBatch = 4, kTokens = 18, kHeads = 3, kDim = 5, kRow = kHeads * kDim;
const std::vector<int32_t> kCu = {0, 4, 4, 14, 16};  // lengths 4, 0, 10, 2; two tokens of tail

// The half-tensor row and the whole row of every c of every sequence's second (or first) half.
struct Pair {
  int64_t sequence, c, half_row, whole_row;
};
std::vector<Pair> pairs(bool second) {
  std::vector<Pair> all;
  for (int64_t i = 0; i < kBatch; ++i) {
    const int64_t half = (kCu[i + 1] - kCu[i]) / 2;
    for (int64_t c = 0; c < half; ++c)
      all.push_back({i, c, kCu[i] / 2 + c, kCu[i] + (second ? half : 0) + c});
  }
  return all;
}

int64_t length(int64_t i) { return kCu[i + 1] - kCu[i]; }

TEST(ContextParallel, ReadHalf) {
  std::mt19937_64 random(1);
  for (int64_t slabs : {0, 2})
    for (int32_t second : {0, 1}) {
      const int64_t n = slabs ? slabs : 1;
      Buffer tensor = random_buffer(TEA_FP16, n * kTokens * kRow, random);
      Buffer half(TEA_FP16, n * kTokens / 2 * kRow), expected(TEA_FP16, half.count());
      tea_cp_half a{};
      a.struct_size = sizeof a;
      a.second = second, a.tensor = tensor.data(), a.half = half.data();
      a.cu_seqlens = kCu.data();
      a.batch = kBatch, a.slabs = slabs, a.tokens = kTokens, a.row_bytes = 2 * kRow;
      cp_read_half(a, {});
      for (int64_t slab = 0; slab < n; ++slab)
        for (const Pair& p : pairs(second))
          for (int64_t e = 0; e < kRow; ++e)
            expected.set((slab * kTokens / 2 + p.half_row) * kRow + e,
                         tensor[(slab * kTokens + p.whole_row) * kRow + e]);
      EXPECT_TRUE(half == expected);  // the tail is untouched too
    }
}

constexpr int64_t kPackedLse = 19, kPackedHalf = 11, kLse = 12, kHalf = 6;

tea_cp_lse lse_arguments(Buffer& lse, Buffer& half, bool packed) {
  tea_cp_lse a{};
  a.struct_size = sizeof a;
  a.packed = packed;
  a.lse = static_cast<float*>(lse.data()), a.half_lse = static_cast<float*>(half.data());
  a.cu_seqlens = kCu.data();
  a.batch = kBatch, a.heads = kHeads;
  a.lse_len = packed ? kPackedLse : kLse, a.half_len = packed ? kPackedHalf : kHalf;
  return a;
}

int64_t whole_at(bool packed, const Pair& p, int64_t h) {
  return packed ? h * kPackedLse + p.whole_row
                : (p.sequence * kHeads + h) * kLse + length(p.sequence) / 2 + p.c;
}
int64_t half_at(bool packed, const Pair& p, int64_t h) {
  return packed ? h * kPackedHalf + p.half_row : (p.sequence * kHeads + h) * kHalf + p.c;
}
int64_t whole_count(bool packed) { return kHeads * (packed ? kPackedLse : kBatch * kLse); }
int64_t half_count(bool packed) { return kHeads * (packed ? kPackedHalf : kBatch * kHalf); }

TEST(ContextParallel, LseCorrect) {
  std::mt19937_64 random(2);
  for (bool packed : {true, false}) {
    Buffer lse = random_buffer(TEA_FP32, whole_count(packed), random);
    Buffer half = random_buffer(TEA_FP32, half_count(packed), random);
    // Infinities on one side, the other, both.
    lse.set(whole_at(packed, pairs(true)[0], 0), kMinusInfinity);
    half.set(half_at(packed, pairs(true)[1], 0), kMinusInfinity);
    lse.set(whole_at(packed, pairs(true)[2], 1), kMinusInfinity);
    half.set(half_at(packed, pairs(true)[2], 1), kMinusInfinity);
    Buffer expected(TEA_FP32, lse.values());
    for (const Pair& p : pairs(true))
      for (int64_t h = 0; h < kHeads; ++h) {
        const double a = lse[whole_at(packed, p, h)], b = half[half_at(packed, p, h)];
        expected.set(whole_at(packed, p, h), std::log(std::exp(a) + std::exp(b)));
      }
    cp_lse_correct(lse_arguments(lse, half, packed), {});
    for (int64_t i = 0; i < lse.count(); ++i)
      if (std::isinf(expected[i]))
        ASSERT_EQ(lse[i], kMinusInfinity);
      else
        ASSERT_NEAR(lse[i], expected[i], 1e-6) << i;
  }
}

TEST(ContextParallel, LseRead) {
  std::mt19937_64 random(3);
  for (bool packed : {true, false}) {
    Buffer lse = random_buffer(TEA_FP32, whole_count(packed), random);
    Buffer half(TEA_FP32, half_count(packed)), expected(TEA_FP32, half_count(packed));
    cp_lse_read(lse_arguments(lse, half, packed), {});
    for (const Pair& p : pairs(true))
      for (int64_t h = 0; h < kHeads; ++h)
        expected.set(half_at(packed, p, h), lse[whole_at(packed, p, h)]);
    EXPECT_TRUE(half == expected);
  }
}

struct Out {
  Buffer out, step, lse, step_lse;
};

Out out_tensors(int32_t dtype, bool second, bool packed, std::mt19937_64& random) {
  Out o = {random_buffer(dtype, kTokens * kRow, random),
           random_buffer(dtype, kTokens * kRow / (second ? 2 : 1), random),
           random_buffer(TEA_FP32, whole_count(packed), random),
           random_buffer(TEA_FP32, second ? half_count(packed) : whole_count(packed), random)};
  // Rows that a step did not see: NaN LSE arithmetic must not reach the result.
  o.step_lse.set(0, kMinusInfinity);
  o.lse.set(0, kMinusInfinity);
  o.lse.set(1, NAN);
  o.step.set(kRow, 0);
  return o;
}

tea_cp_out out_arguments(Out& o, bool second, bool packed) {
  tea_cp_out a{};
  a.struct_size = sizeof a;
  a.dtype = o.out.dtype();
  a.only_second_half = second, a.packed = packed;
  a.out = o.out.data(), a.step_out = o.step.data();
  a.lse = static_cast<float*>(o.lse.data());
  a.step_lse = static_cast<float*>(o.step_lse.data());
  a.cu_seqlens = kCu.data();
  a.batch = kBatch, a.tokens = kTokens, a.heads = kHeads, a.dim = kDim;
  a.lse_len = packed ? kPackedLse : kLse;
  a.step_lse_len = second ? (packed ? kPackedHalf : kHalf) : a.lse_len;
  return a;
}

// Adds one head of one row by the definition.
void add_expected(Buffer& out, int64_t row, Out& o, int64_t step_row, int64_t h, double lse,
                  double step_lse) {
  for (int64_t d = 0; d < kDim; ++d) {
    const double x = o.step[(step_row * kHeads + h) * kDim + d];
    if (x == 0 || step_lse == kMinusInfinity) continue;
    Buffer product(out.dtype(), std::vector{x * std::exp(step_lse - lse)});
    const int64_t at = (row * kHeads + h) * kDim + d;
    out.set(at, out[at] + product[0]);
  }
}

void expect_same(const Buffer& actual, const Buffer& expected) {
  for (int64_t i = 0; i < actual.count(); ++i)
    if (std::isnan(expected[i]))
      ASSERT_TRUE(std::isnan(actual[i])) << i;
    else
      ASSERT_EQ(actual[i], expected[i]) << dtype_name(actual.dtype()) << " element " << i;
}

TEST(ContextParallel, OutCorrect) {
  std::mt19937_64 random(4);
  for (int32_t dtype : kEveryReal)
    for (bool packed : {true, false}) {
      Out o = out_tensors(dtype, false, packed, random);
      Buffer expected(dtype, o.out.values());
      for (int64_t i = 0; i < kBatch; ++i)
        for (int64_t c = 0; c < length(i); ++c)
          for (int64_t h = 0; h < kHeads; ++h) {
            const int64_t row = kCu[i] + c;
            const int64_t at = packed ? h * kPackedLse + row : (i * kHeads + h) * kLse + c;
            add_expected(expected, row, o, row, h, o.lse[at], o.step_lse[at]);
          }
      cp_out_correct(out_arguments(o, false, packed), {});
      expect_same(o.out, expected);
    }
}

TEST(ContextParallel, OutCorrectOfSecondHalves) {
  std::mt19937_64 random(5);
  for (int32_t dtype : kEveryReal)
    for (bool packed : {true, false}) {
      Out o = out_tensors(dtype, true, packed, random);
      Buffer expected(dtype, o.out.values());
      for (const Pair& p : pairs(true))
        for (int64_t h = 0; h < kHeads; ++h)
          add_expected(expected, p.whole_row, o, p.half_row, h, o.lse[whole_at(packed, p, h)],
                       o.step_lse[half_at(packed, p, h)]);
      cp_out_correct(out_arguments(o, true, packed), {});
      expect_same(o.out, expected);
    }
}

tea_cp_grad grad_arguments(Buffer& grad, Buffer& step, int32_t first, int32_t second) {
  tea_cp_grad a{};
  a.struct_size = sizeof a;
  a.dtype = grad.dtype(), a.first = first, a.second = second;
  a.grad = grad.data(), a.step_grad = step.data(), a.cu_seqlens = kCu.data();
  a.batch = kBatch, a.slabs = grad.count() / (kTokens * kRow);
  a.tokens = kTokens, a.row_elements = kRow;
  return a;
}

void grad_row(Buffer& grad, int64_t to, const Buffer& step, int64_t from, int32_t action) {
  for (int64_t e = 0; e < kRow; ++e) {
    const double x = step[from * kRow + e];
    grad.set(to * kRow + e, action == TEA_CP_ADD ? grad[to * kRow + e] + x : x);
  }
}

TEST(ContextParallel, GradCorrectByEveryPairOfActions) {
  std::mt19937_64 random(6);
  const int32_t actions[][2] = {{1, 0}, {2, 0}, {0, 1}, {0, 2}, {1, 2}, {2, 1}};
  for (int32_t dtype : kEveryReal)
    for (const auto& action : actions)
      for (int64_t slabs : {1, 2}) {
        const bool half = !action[0] || !action[1];
        const int64_t step_tokens = half ? kTokens / 2 : kTokens;
        Buffer grad = random_buffer(dtype, slabs * kTokens * kRow, random);
        Buffer step = random_buffer(dtype, slabs * step_tokens * kRow, random);
        Buffer expected(dtype, grad.values());
        for (int64_t slab = 0; slab < slabs; ++slab)
          for (int second : {0, 1})
            for (const Pair& p : pairs(second))
              if (action[second])
                grad_row(expected, slab * kTokens + p.whole_row, step,
                         slab * step_tokens + (half ? p.half_row : p.whole_row), action[second]);
        cp_grad_correct(grad_arguments(grad, step, action[0], action[1]), {});
        EXPECT_TRUE(grad == expected) << action[0] << action[1];
      }
}

TEST(ContextParallel, CopyOverwritesNan) {
  std::mt19937_64 random(7);
  Buffer grad(TEA_BF16, kTokens * kRow);
  Buffer step = random_buffer(TEA_BF16, kTokens / 2 * kRow, random);
  cp_grad_correct(grad_arguments(grad, step, TEA_CP_COPY, TEA_CP_NONE), {});
  EXPECT_EQ(grad[0], step[0]);
  EXPECT_TRUE(grad.untouched(2 * kRow));  // the second half of sequence 0
}

TEST(ContextParallel, InvalidValuesAreReportedAndNotFollowed) {
  std::mt19937_64 random(8);
  const std::vector<int32_t> bad[] = {
      {0, 3, 4, 14, 16}, {0, 4, 2, 14, 16}, {-2, 4, 4, 14, 16}, {0, 4, 4, 14, 2000000000}};
  for (const std::vector<int32_t>& cu : bad) {
    Out o = out_tensors(TEA_FP32, false, true, random);
    Buffer half(TEA_FP32, half_count(false)), lse(TEA_FP32, whole_count(false));
    int32_t out_status = 0, lse_status = 0, grad_status = 0;
    tea_cp_out out = out_arguments(o, false, true);
    out.cu_seqlens = cu.data(), out.status = &out_status;
    cp_out_correct(out, {});
    tea_cp_lse read = lse_arguments(lse, half, false);
    read.cu_seqlens = cu.data(), read.status = &lse_status;
    cp_lse_read(read, {});
    tea_cp_grad grad = grad_arguments(o.out, o.step, TEA_CP_ADD, TEA_CP_COPY);
    grad.cu_seqlens = cu.data(), grad.status = &grad_status;
    cp_grad_correct(grad, {});
    EXPECT_EQ(out_status, TEA_STATUS_BAD_LENGTHS);
    EXPECT_EQ(lse_status, TEA_STATUS_BAD_LENGTHS);
    EXPECT_EQ(grad_status, TEA_STATUS_BAD_LENGTHS);
  }
}

TEST(ContextParallel, NamesWhatIsWrong) {
  Buffer x(TEA_FP32, kTokens * kRow);
  const auto grad = [&](int32_t first, int32_t second) {
    return error_of([&] { cp_grad_correct(grad_arguments(x, x, first, second), {}); });
  };
  EXPECT_EQ(grad(0, 0), "second is 0; needs another action than first, which is 0");
  EXPECT_EQ(grad(1, 1), "second is 1; needs another action than first, which is 1");
  EXPECT_EQ(grad(3, 1), "first is 3; needs a tea_cp_action");
  tea_cp_half half{};
  half.second = 2;
  EXPECT_EQ(error_of([&] { cp_read_half(half, {}); }), "second is 2; needs 0 or 1");
  tea_cp_lse lse = lse_arguments(x, x, true);
  lse.half_lse = nullptr;
  EXPECT_EQ(error_of([&] { cp_lse_correct(lse, {}); }), "half_lse is NULL; needs memory");
  lse = lse_arguments(x, x, true);
  lse.cu_seqlens = nullptr;
  EXPECT_EQ(error_of([&] { cp_lse_read(lse, {}); }), "cu_seqlens is NULL; needs memory");
  tea_cp_out out{};
  out.dtype = TEA_E5M2;
  EXPECT_EQ(error_of([&] { cp_out_correct(out, {}); }),
            "dtype is e5m2; needs one of fp16, bf16, fp32, fp64");
  out.dtype = TEA_FP16, out.packed = 7;
  EXPECT_EQ(error_of([&] { cp_out_correct(out, {}); }), "packed is 7; needs 0 or 1");
}

}  // namespace
}  // namespace tea
