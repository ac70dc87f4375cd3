// The scaled softmax family against its formulas in float64, at odd sizes, with NaN in every place
// that must not be read.
#include <algorithm>
#include <cmath>
#include <limits>

#include "buffer.h"
#include "ops/softmax.h"

namespace tea {
namespace {

constexpr int32_t kKinds[] = {TEA_SCORE_MASK_NONE, TEA_SCORE_MASK_GIVEN, TEA_SCORE_MASK_CAUSAL,
                              TEA_SCORE_MASK_CAUSAL_BOTTOM_RIGHT};

struct Sizes {
  int64_t batch, heads, rows, cols;
  int64_t count() const { return batch * heads * rows * cols; }
};
constexpr Sizes kSizes[] = {{2, 3, 5, 7}, {1, 1, 1, 1}, {2, 1, 9, 4}, {1, 2, 3, 131}};

bool sees(int32_t kind, const Sizes& s, int64_t row, int64_t col) {
  if (kind == TEA_SCORE_MASK_CAUSAL) return col <= row;
  if (kind == TEA_SCORE_MASK_CAUSAL_BOTTOM_RIGHT) return col <= row + s.cols - s.rows;
  return true;
}

// NaN where the kind must not look.
Buffer hidden(int32_t dtype, int32_t kind, const Sizes& s, std::mt19937_64& random) {
  Buffer x = random_buffer(dtype, s.count(), random);
  for (int64_t i = 0; i < s.count(); ++i)
    if (!sees(kind, s, i / s.cols % s.rows, i % s.cols)) x.set(i, NAN);
  return x;
}

tea_scaled_softmax arguments(int32_t dtype, int32_t kind, const Sizes& s, float scale) {
  tea_scaled_softmax a{};
  a.struct_size = sizeof a;
  a.dtype = dtype, a.kind = kind, a.scale = scale;
  a.batch = s.batch, a.heads = s.heads, a.rows = s.rows, a.cols = s.cols;
  return a;
}

std::vector<uint8_t> random_mask(int64_t count, std::mt19937_64& random) {
  std::vector<uint8_t> mask;
  for (int64_t i = 0; i < count; ++i) mask.push_back(random() % 3 == 0);
  return mask;
}

// One row of the definition; `masked` may be NULL.
std::vector<double> forward_row(const tea_scaled_softmax& a, const Sizes& s, int64_t row,
                                const std::vector<double>& x, const uint8_t* masked) {
  Buffer scale(a.dtype, std::vector{double{a.scale}});
  double sum = 0, most = -std::numeric_limits<double>::infinity();
  std::vector<double> score(x.size()), y(x.size(), 0.0);
  for (int64_t c = 0; c < s.cols; ++c) {
    score[c] = masked && masked[c] == 1 ? -10000 : x[c] * scale[0];
    if (sees(a.kind, s, row, c)) most = std::max(most, score[c]);
  }
  if (masked && most == -10000) return y;
  for (int64_t c = 0; c < s.cols; ++c)
    if (sees(a.kind, s, row, c)) sum += std::exp(score[c] - most);
  for (int64_t c = 0; c < s.cols; ++c)
    if (sees(a.kind, s, row, c)) y[c] = std::exp(score[c] - most) / sum;
  return y;
}

void check_forward(int32_t dtype, int32_t kind, const Sizes& s, std::mt19937_64& random) {
  Buffer x = hidden(dtype, kind, s, random), y(dtype, s.count());
  tea_scaled_softmax a = arguments(dtype, kind, s, 0.7f);
  std::vector<uint8_t> mask = random_mask(s.batch * s.rows * s.cols, random);
  std::fill(mask.begin(), mask.begin() + s.cols, uint8_t{1});  // one row without a key
  a.input = x.data(), a.output = y.data();
  if (kind == TEA_SCORE_MASK_GIVEN) a.mask = mask.data();
  for (int64_t shared : {0, 1}) {
    a.mask_batch = kind == TEA_SCORE_MASK_GIVEN ? shared : 0;
    scaled_softmax_forward(a, {});
    for (int64_t line = 0; line < s.count() / s.cols; ++line) {
      const int64_t row = line % s.rows, b = line / s.rows / s.heads;
      std::vector<double> in;
      for (int64_t c = 0; c < s.cols; ++c) in.push_back(x[line * s.cols + c]);
      const int64_t mask_line = ((a.mask_batch == 1 ? 0 : b) * s.rows + row) * s.cols;
      const auto want = forward_row(a, s, row, in, a.mask ? &mask[mask_line] : nullptr);
      for (int64_t c = 0; c < s.cols; ++c) {
        const double got = y[line * s.cols + c];
        ASSERT_NEAR(got, want[c], (rounding_unit(dtype) + 1e-12) * want[c] + 1e-7)
            << dtype_name(dtype) << " kind " << kind << " line " << line << " col " << c;
        if (!sees(kind, s, row, c)) {
          ASSERT_EQ(got, 0);
        }
      }
    }
  }
}

TEST(Softmax, ForwardOfEveryKindAndDtype) {
  std::mt19937_64 random(1);
  for (int32_t dtype : kEveryReal)
    for (int32_t kind : kKinds)
      for (const Sizes& s : kSizes) check_forward(dtype, kind, s, random);
}

void check_backward(int32_t dtype, int32_t kind, const Sizes& s, std::mt19937_64& random) {
  Buffer y = hidden(dtype, kind, s, random), dy = hidden(dtype, kind, s, random);
  Buffer dx(dtype, s.count()), in_place(dtype, dy.values());
  tea_scaled_softmax a = arguments(dtype, kind, s, 0.7f);
  a.input = y.data(), a.dout = dy.data(), a.output = dx.data();
  scaled_softmax_backward(a, {});
  for (int64_t i = 0; i < s.count(); ++i) {
    const int64_t first = i / s.cols * s.cols, row = i / s.cols % s.rows;
    if (!sees(kind, s, row, i - first)) {
      ASSERT_EQ(dx[i], 0);
      continue;
    }
    double sum = 0, size = 0;
    for (int64_t c = 0; c < s.cols; ++c)
      if (sees(kind, s, row, c)) {
        sum += y[first + c] * dy[first + c];
        size += std::abs(y[first + c] * dy[first + c]);
      }
    const double want = double{0.7f} * (y[i] * dy[i] - y[i] * sum);
    ASSERT_NEAR(dx[i], want,
                rounding_unit(dtype) * std::abs(want) + 1e-12 * (1 + std::abs(y[i]) * size) + 1e-7)
        << dtype_name(dtype) << " kind " << kind;
  }
  a.dout = in_place.data(), a.output = in_place.data();
  scaled_softmax_backward(a, {});
  EXPECT_TRUE(in_place == dx);
}

TEST(Softmax, BackwardOfEveryKindAndDtypeAlsoInPlace) {
  std::mt19937_64 random(2);
  for (int32_t dtype : kEveryReal)
    for (int32_t kind : kKinds)
      for (const Sizes& s : kSizes) check_backward(dtype, kind, s, random);
}

TEST(Softmax, ScaleIsRoundedToTheDtypeInForwardOnly) {
  // 0.01 is not a bf16 number: times 1024, the difference shows even after rounding the result.
  const Sizes s = {1, 1, 1, 2};
  Buffer x(TEA_BF16, {0, -1024}), y(TEA_BF16, 2), scale(TEA_BF16, std::vector{0.01});
  tea_scaled_softmax a = arguments(TEA_BF16, TEA_SCORE_MASK_NONE, s, 0.01f);
  a.input = x.data(), a.output = y.data();
  scaled_softmax_forward(a, {});
  const auto second = [](double score) {
    return Buffer(TEA_BF16, std::vector{std::exp(score) / (1 + std::exp(score))})[0];
  };
  EXPECT_EQ(y[1], second(-1024 * scale[0]));
  EXPECT_NE(y[1], second(-10.24));
}

TEST(Softmax, ExtremeRows) {
  const Sizes s = {1, 1, 1, 3};
  const double inf = std::numeric_limits<double>::infinity();
  const auto row = [&](std::vector<double> x, const std::vector<uint8_t>& mask) {
    Buffer in(TEA_FP32, x), out(TEA_FP32, 3);
    tea_scaled_softmax a =
        arguments(TEA_FP32, mask.empty() ? TEA_SCORE_MASK_NONE : TEA_SCORE_MASK_GIVEN, s, 1);
    a.input = in.data(), a.output = out.data();
    a.mask = mask.empty() ? nullptr : mask.data();
    scaled_softmax_forward(a, {});
    return out.values();
  };
  EXPECT_EQ(row({3e38, -3e38, 0}, {}), (std::vector<double>{1, 0, 0}));
  for (double y : row({-inf, -inf, -inf}, {})) EXPECT_TRUE(std::isnan(y));
  for (double y : row({1, NAN, 2}, {})) EXPECT_TRUE(std::isnan(y));
  EXPECT_EQ(row({NAN, 1, 1}, {1, 0, 0}), (std::vector<double>{0, 0.5, 0.5}));
  EXPECT_EQ(row({5, 6, 7}, {1, 1, 1}), (std::vector<double>{0, 0, 0}));
  // A key far below -10000 loses against the masked ones; a mask byte other than 1 does not mask.
  EXPECT_EQ(row({-20000, 0, 0}, {0, 1, 1}), (std::vector<double>{0, 0, 0}));
  EXPECT_EQ(row({0, -inf, -inf}, {2, 0, 0}), (std::vector<double>{1, 0, 0}));
  // NaN in a row with masked keys is not hidden by the rule for fully masked rows.
  for (double y : row({NAN, 0, 0}, {0, 1, 1})) EXPECT_TRUE(std::isnan(y));
}

TEST(Softmax, NamesWhatIsWrong) {
  const Sizes s = {2, 1, 2, 2};
  Buffer x(TEA_FP16, s.count());
  uint8_t mask[8] = {};
  const auto error = [&](bool forward, auto change) {
    tea_scaled_softmax a = arguments(TEA_FP16, TEA_SCORE_MASK_NONE, s, 1);
    a.input = x.data(), a.output = x.data(), a.dout = forward ? nullptr : x.data();
    change(a);
    return error_of([&] { (forward ? scaled_softmax_forward : scaled_softmax_backward)(a, {}); });
  };
  EXPECT_EQ(error(true, [](auto& a) { a.dtype = TEA_E4M3; }),
            "dtype is e4m3; needs one of fp16, bf16, fp32, fp64");
  EXPECT_EQ(error(true, [](auto& a) { a.kind = 4; }), "kind is 4; needs a tea_score_mask");
  EXPECT_EQ(error(true, [](auto& a) { a.kind = TEA_SCORE_MASK_GIVEN; }),
            "mask is NULL; needs memory");
  EXPECT_EQ(error(true, [&](auto& a) { a.mask = mask; }),
            "mask is a pointer; needs NULL except in forward with kind GIVEN");
  EXPECT_EQ(error(true, [&](auto& a) { a.kind = 1, a.mask = mask, a.mask_batch = 3; }),
            "mask_batch is 3; needs 1 or batch with a mask, 0 without");
  EXPECT_EQ(error(true, [&](auto& a) { a.dout = mask; }),
            "dout is a pointer; needs NULL in forward");
  EXPECT_EQ(error(false, [](auto& a) { a.dout = nullptr; }), "dout is NULL; needs memory");
  EXPECT_EQ(error(false, [](auto& a) { a.rows = -1; }), "rows is -1; needs 0 or more");
  EXPECT_EQ(error(false, [](auto& a) { a.cols = 0, a.input = nullptr; }), "");
}

}  // namespace
}  // namespace tea
