// The softmax entry points: shapes and kinds reach the right operation, whose own tests have the
// formulas at length; the quirks of this interface; and what is refused.
#include <cmath>

#include "expect_error.h"
#include "ops/buffer.h"
#include "tensor_of.h"
#include "transformer_engine/softmax.h"

namespace tea {
namespace {

using nvte::test::handle_of;
using transformer_engine::DType;
using transformer_engine::TensorWrapper;

using Forward = void(const NVTETensor, NVTETensor, float, cudaStream_t);
using Backward = void(const NVTETensor, const NVTETensor, NVTETensor, float, cudaStream_t);

struct Kind {
  Forward* forward;
  Backward* backward;
  std::vector<size_t> shape;
  // Does row q see column k?
  bool (*sees)(int64_t q, int64_t k, int64_t sq, int64_t sk);
};

bool all(int64_t, int64_t, int64_t, int64_t) { return true; }
bool top_left(int64_t q, int64_t k, int64_t, int64_t) { return k <= q; }
bool bottom_right(int64_t q, int64_t k, int64_t sq, int64_t sk) { return k <= q + sk - sq; }

// Rows and columns that the original refuses: odd, tiny, above 64 and no multiple of 4.
const std::vector<Kind> kKinds = {
    {nvte_scaled_softmax_forward, nvte_scaled_softmax_backward, {2, 3, 5, 67}, all},
    {nvte_scaled_softmax_forward, nvte_scaled_softmax_backward, {1, 1, 1, 1}, all},
    {nvte_scaled_upper_triang_masked_softmax_forward,
     nvte_scaled_upper_triang_masked_softmax_backward,
     {3, 9, 9},
     top_left},
    {nvte_scaled_aligned_causal_masked_softmax_forward,
     nvte_scaled_aligned_causal_masked_softmax_backward,
     {2, 1, 7, 5},
     bottom_right},
    {nvte_scaled_aligned_causal_masked_softmax_forward,
     nvte_scaled_aligned_causal_masked_softmax_backward,
     {1, 2, 3, 6},
     bottom_right},
};

int64_t count(const std::vector<size_t>& shape) {
  size_t product = 1;
  for (size_t dim : shape) product *= dim;
  return static_cast<int64_t>(product);
}

TEST(NvteSoftmax, ForwardOfEveryKind) {
  std::mt19937_64 random(1);
  for (int32_t dtype : {TEA_FP16, TEA_BF16})
    for (const Kind& kind : kKinds) {
      const int64_t sk = static_cast<int64_t>(kind.shape.back());
      const int64_t sq = static_cast<int64_t>(kind.shape[kind.shape.size() - 2]);
      Buffer x = random_buffer(dtype, count(kind.shape), random), y(dtype, x.count());
      Buffer scale(dtype, std::vector{0.3});
      const TensorWrapper input = handle_of(x, kind.shape), output = handle_of(y, kind.shape);
      kind.forward(input.data(), output.data(), 0.3f, nullptr);
      for (int64_t i = 0; i < x.count(); ++i) {
        const int64_t first = i / sk * sk, q = i / sk % sq;
        double sum = 0;
        for (int64_t k = 0; k < sk; ++k)
          if (kind.sees(q, k, sq, sk)) sum += std::exp(scale[0] * x[first + k]);
        const bool seen = kind.sees(q, i - first, sq, sk);
        const double want = seen ? std::exp(scale[0] * x[i]) / sum : 0;
        ASSERT_NEAR(y[i], want, 1.001 * rounding_unit(dtype) * want + 1e-7) << i;
      }
    }
}

TEST(NvteSoftmax, BackwardOfEveryKindAlsoInPlace) {
  std::mt19937_64 random(2);
  for (int32_t dtype : {TEA_FP16, TEA_BF16})
    for (const Kind& kind : kKinds) {
      const int64_t sk = static_cast<int64_t>(kind.shape.back());
      const int64_t sq = static_cast<int64_t>(kind.shape[kind.shape.size() - 2]);
      Buffer y = random_buffer(dtype, count(kind.shape), random);
      Buffer dy = random_buffer(dtype, y.count(), random), dx(dtype, dy.values());
      const TensorWrapper results = handle_of(y, kind.shape), gradient = handle_of(dx, kind.shape);
      kind.backward(gradient.data(), results.data(), gradient.data(), 0.3f, nullptr);
      for (int64_t i = 0; i < y.count(); ++i) {
        const int64_t first = i / sk * sk, q = i / sk % sq;
        double sum = 0;
        for (int64_t k = 0; k < sk; ++k)
          if (kind.sees(q, k, sq, sk)) sum += y[first + k] * dy[first + k];
        const double want =
            kind.sees(q, i - first, sq, sk) ? double{0.3f} * (y[i] * dy[i] - y[i] * sum) : 0;
        ASSERT_NEAR(dx[i], want, 1.001 * rounding_unit(dtype) * std::abs(want) + 1e-7) << i;
      }
    }
}

TEST(NvteSoftmax, MaskIsSharedIfItsFirstDimensionIsOne) {
  const std::vector<size_t> shape = {2, 1, 1, 3};
  Buffer x(TEA_FP16, {1, 1, 1, 1, 1, 1}), y(TEA_FP16, 6);
  const TensorWrapper input = handle_of(x, shape), output = handle_of(y, shape);
  uint8_t mask[6] = {1, 0, 0, 1, 1, 1};
  const auto run = [&](size_t batch) {
    const TensorWrapper m(mask, std::vector<size_t>{batch, 1, 1, 3}, DType::kByte);
    nvte_scaled_masked_softmax_forward(input.data(), m.data(), output.data(), 1, nullptr);
    return y.values();
  };
  EXPECT_EQ(run(1), (std::vector<double>{0, 0.5, 0.5, 0, 0.5, 0.5}));
  EXPECT_EQ(run(2), (std::vector<double>{0, 0.5, 0.5, 0, 0, 0}));
}

TEST(NvteSoftmax, MaskedBackwardIsThePlainOne) {
  std::mt19937_64 random(3);
  const std::vector<size_t> shape = {2, 2, 3, 5};
  Buffer y = random_buffer(TEA_BF16, 60, random), dy = random_buffer(TEA_BF16, 60, random);
  Buffer plain(TEA_BF16, 60), masked(TEA_BF16, 60);
  const TensorWrapper results = handle_of(y, shape), incoming = handle_of(dy, shape);
  const TensorWrapper a = handle_of(plain, shape), b = handle_of(masked, shape);
  nvte_scaled_softmax_backward(incoming.data(), results.data(), a.data(), 2, nullptr);
  nvte_scaled_masked_softmax_backward(incoming.data(), results.data(), b.data(), 2, nullptr);
  EXPECT_TRUE(plain == masked);
}

TEST(NvteSoftmax, NoColumnsIsNoWork) {
  const TensorWrapper none(nullptr, std::vector<size_t>{2, 1, 3, 0}, DType::kFloat16);
  nvte_scaled_softmax_forward(none.data(), none.data(), 1, nullptr);
  nvte_scaled_softmax_backward(none.data(), none.data(), none.data(), 1, nullptr);
}

TEST(NvteSoftmax, Refuses) {
  Buffer fp32(TEA_FP32, 4), fp16(TEA_FP16, 6), bf16(TEA_BF16, 6);
  const TensorWrapper wide = handle_of(fp32, {1, 1, 2, 2}), four = handle_of(fp16, {1, 1, 2, 3});
  const TensorWrapper other = handle_of(bf16, {1, 1, 2, 3}), three = handle_of(fp16, {1, 2, 3});
  const TensorWrapper small = handle_of(fp16, {1, 1, 1, 3});
  EXPECT_NVTE_ERROR(nvte_scaled_softmax_forward(wide.data(), wide.data(), 1, nullptr),
                    "input.dtype is fp32; needs one of fp16, bf16");
  EXPECT_NVTE_ERROR(nvte_scaled_softmax_backward(four.data(), four.data(), wide.data(), 1, nullptr),
                    "output_grads.dtype is fp32; needs one of fp16, bf16");
  EXPECT_NVTE_ERROR(nvte_scaled_softmax_forward(three.data(), three.data(), 1, nullptr),
                    "input.ndim is 3; needs 4");
  EXPECT_NVTE_ERROR(
      nvte_scaled_upper_triang_masked_softmax_forward(three.data(), three.data(), 1, nullptr),
      "input.shape[2] is 3; needs shape[1], 2");
  EXPECT_NVTE_ERROR(nvte_scaled_softmax_forward(four.data(), other.data(), 1, nullptr),
                    "softmax_results.dtype is 6; needs that of input, 5");
  EXPECT_NVTE_ERROR(nvte_scaled_softmax_forward(four.data(), small.data(), 1, nullptr),
                    "softmax_results.numel is 3; needs 6 or more");
  EXPECT_NVTE_ERROR(
      nvte_scaled_masked_softmax_forward(four.data(), small.data(), four.data(), 1, nullptr),
      "mask.numel is 3; needs 6 or more");
  EXPECT_NVTE_ERROR(nvte_scaled_softmax_forward(nullptr, four.data(), 1, nullptr),
                    "Invalid tensor.");
}

}  // namespace
}  // namespace tea
