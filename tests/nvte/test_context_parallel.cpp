// The context-parallel helpers of the TransformerEngine C API: shapes reach the right operation,
// whose own tests have the formulas at length; handles by reference; and what is refused.
#include <cmath>
#include <limits>

#include "expect_error.h"
#include "ops/buffer.h"
#include "tensor_of.h"
#include "transformer_engine/fused_attn.h"

namespace tea {
namespace {

using nvte::test::handle_of;
using nvte::test::ints;
using transformer_engine::TensorWrapper;

// Lengths 4 and 2; tokens a0 a1 a2 a3 b0 b1. Second halves: rows 2, 3 and 5.
std::vector<int32_t> cu = {0, 4, 6};
constexpr int64_t kTokens = 6, kHalf = 3;
const int64_t kSecond[kHalf] = {2, 3, 5}, kFirst[kHalf] = {0, 1, 4};
const int64_t* half_rows(int second) { return second ? kSecond : kFirst; }
constexpr size_t kHeads = 2, kDim = 3;
constexpr int64_t kRow = kHeads * kDim;

struct Fixture : testing::Test {
  std::mt19937_64 random{1};
  TensorWrapper lengths = ints(cu);
  Buffer draw(int32_t dtype, int64_t n) { return random_buffer(dtype, n, random); }
  // Functions take references to handles, so that these must be lvalues.
  NVTETensor cu_handle = lengths.data();
};
using CpThd = Fixture;

TEST_F(CpThd, ReadHalf) {
  for (int half_idx : {0, 1})
    for (size_t slabs : {0, 2}) {
      const int64_t n = slabs ? 2 : 1;
      Buffer x = draw(TEA_E4M3, n * kTokens * kRow), y(TEA_E4M3, n * kHalf * kRow);
      std::vector<size_t> whole = {kTokens, kHeads, kDim}, part = {kHalf, kHeads, kDim};
      if (slabs) whole.insert(whole.begin(), slabs), part.insert(part.begin(), slabs);
      const TensorWrapper tensor = handle_of(x, whole), half = handle_of(y, part);
      const NVTETensor handle = tensor.data();
      nvte_cp_thd_read_half_tensor(handle, cu_handle, half.data(), half_idx, nullptr);
      for (int64_t i = 0; i < n * kHalf * kRow; ++i) {
        const int64_t row = half_rows(half_idx)[i / kRow % kHalf];
        ASSERT_EQ(y[i], x[(i / (kHalf * kRow) * kTokens + row) * kRow + i % kRow]);
      }
    }
}

// LSE rows of head h that the second halves have: packed [h, 7] and [h, 4], else [2, h, 5], [2, h,
// 2].
struct Lse {
  bool packed;
  std::vector<size_t> whole() const {
    return packed ? std::vector<size_t>{kHeads, 7} : std::vector<size_t>{2, kHeads, 5};
  }
  std::vector<size_t> half() const {
    return packed ? std::vector<size_t>{kHeads, 4} : std::vector<size_t>{2, kHeads, 2};
  }
  int64_t whole_at(int64_t n, int64_t h) const {
    if (packed) return h * 7 + kSecond[n];
    return n < 2 ? h * 5 + 2 + n : (2 + h) * 5 + 1;
  }
  int64_t half_at(int64_t n, int64_t h) const {
    if (packed) return h * 4 + n;
    return n < 2 ? h * 2 + n : (2 + h) * 2;
  }
};

TEST_F(CpThd, SecondHalfLseCorrection) {
  for (bool packed : {true, false}) {
    const Lse at = {packed};
    Buffer lse = draw(TEA_FP32, packed ? 14 : 20), step = draw(TEA_FP32, 8);
    const double inf = std::numeric_limits<double>::infinity();
    lse.set(at.whole_at(1, 0), -inf), step.set(at.half_at(1, 0), -inf);
    Buffer want(TEA_FP32, lse.values());
    for (int64_t n = 0; n < kHalf; ++n)
      for (int64_t h = 0; h < 2; ++h)
        want.set(at.whole_at(n, h),
                 std::log(std::exp(lse[at.whole_at(n, h)]) + std::exp(step[at.half_at(n, h)])));
    const TensorWrapper whole = handle_of(lse, at.whole()), part = handle_of(step, at.half());
    const NVTETensor handle = part.data();
    nvte_cp_thd_second_half_lse_correction(whole.data(), handle, cu_handle, packed, nullptr);
    for (int64_t i = 0; i < lse.count(); ++i) {
      if (std::isinf(want[i])) {
        EXPECT_EQ(lse[i], -inf);
      } else {
        EXPECT_NEAR(lse[i], want[i], 1e-6);
      }
    }
  }
}

TEST_F(CpThd, ReadSecondHalfLse) {
  for (bool packed : {true, false}) {
    const Lse at = {packed};
    Buffer lse = draw(TEA_FP32, packed ? 14 : 20), half(TEA_FP32, 8), want(TEA_FP32, 8);
    for (int64_t n = 0; n < kHalf; ++n)
      for (int64_t h = 0; h < 2; ++h) want.set(at.half_at(n, h), lse[at.whole_at(n, h)]);
    const TensorWrapper whole = handle_of(lse, at.whole()), part = handle_of(half, at.half());
    const NVTETensor handle = whole.data();
    nvte_cp_thd_read_second_half_lse(handle, cu_handle, part.data(), packed, packed ? 4 : 2,
                                     nullptr);
    EXPECT_TRUE(half == want);  // the rest is untouched
  }
}

TEST_F(CpThd, OutCorrectionOfSecondHalves) {
  for (bool packed : {true, false})
    for (int32_t dtype : {TEA_FP16, TEA_BF16, TEA_FP32}) {
      const Lse at = {packed};
      Buffer out = draw(dtype, kTokens * kRow), step = draw(dtype, kHalf * kRow);
      Buffer lse = draw(TEA_FP32, packed ? 14 : 20), step_lse = draw(TEA_FP32, 8);
      Buffer want(dtype, out.values());
      for (int64_t i = 0; i < kHalf * kRow; ++i) {
        const int64_t n = i / kRow, h = i % kRow / static_cast<int64_t>(kDim);
        const double weight = std::exp(step_lse[at.half_at(n, h)] - lse[at.whole_at(n, h)]);
        Buffer product(dtype, std::vector{step[i] * weight});
        const int64_t to = kSecond[n] * kRow + i % kRow;
        want.set(to, want[to] + product[0]);
      }
      const TensorWrapper o = handle_of(out, {kTokens, kHeads, kDim});
      const TensorWrapper s = handle_of(step, {kHalf, kHeads, kDim});
      const TensorWrapper l = handle_of(lse, at.whole()), p = handle_of(step_lse, at.half());
      const NVTETensor sh = s.data(), lh = l.data(), ph = p.data();
      nvte_cp_thd_out_correction(o.data(), sh, lh, ph, cu_handle, 1, packed, nullptr);
      EXPECT_TRUE(out == want);
    }
}

TEST_F(CpThd, OutCorrectionOfWholeSequences) {
  Buffer out = draw(TEA_FP32, kTokens * kRow), step = draw(TEA_FP32, kTokens * kRow);
  Buffer lse = draw(TEA_FP32, 20), step_lse = draw(TEA_FP32, 20), before(TEA_FP32, out.values());
  step.set(0, 0);
  lse.set(0, -std::numeric_limits<double>::infinity());
  const TensorWrapper o = handle_of(out, {kTokens, kHeads, kDim});
  const TensorWrapper s = handle_of(step, {kTokens, kHeads, kDim});
  const TensorWrapper l = handle_of(lse, {2, kHeads, 5}), p = handle_of(step_lse, {2, kHeads, 5});
  const NVTETensor sh = s.data(), lh = l.data(), ph = p.data();
  nvte_cp_thd_out_correction(o.data(), sh, lh, ph, cu_handle, 0, 0, nullptr);
  EXPECT_EQ(out[0], before[0]);  // a zero adds nothing, even with a weight of infinity
  // token 5 is row 1 of sequence 1; head 1, dim 2
  const int64_t at = 5 * kRow + 5, line = (2 + 1) * 5 + 1;
  EXPECT_NEAR(out[at], before[at] + step[at] * std::exp(step_lse[line] - lse[line]), 1e-6);
}

TEST_F(CpThd, GradCorrection) {
  struct Actions {
    const char *first, *second;
  };
  for (const Actions& actions : {Actions{"add", "none"},
                                 {"copy", "none"},
                                 {"none", "add"},
                                 {"none", "copy"},
                                 {"add", "copy"},
                                 {"copy", "add"}}) {
    const std::string action[2] = {actions.first, actions.second};
    const bool half = action[0] == "none" || action[1] == "none";
    Buffer grad = draw(TEA_BF16, kTokens * kRow);
    Buffer step = draw(TEA_BF16, (half ? kHalf : kTokens) * kRow), want(TEA_BF16, grad.values());
    for (int second : {0, 1})
      for (int64_t i = 0; i < kHalf * kRow; ++i) {
        if (action[second] == "none") continue;
        const int64_t to = half_rows(second)[i / kRow] * kRow + i % kRow;
        const double x = step[half ? i : to];
        want.set(to, action[second] == "add" ? want[to] + x : x);
      }
    const TensorWrapper g = handle_of(grad, {kTokens, kHeads, kDim});
    const TensorWrapper s = handle_of(step, {half ? size_t{kHalf} : kTokens, kHeads, kDim});
    const NVTETensor sh = s.data();
    nvte_cp_thd_grad_correction(g.data(), sh, cu_handle, actions.first, actions.second, nullptr);
    EXPECT_TRUE(grad == want) << action[0] << " " << action[1];
  }
}

TEST_F(CpThd, PartitionedIndices) {
  std::vector<int32_t> global = {0, 8, 12}, indices(6, -1);
  const TensorWrapper cu_global = ints(global), output = ints(indices);
  const NVTETensor handle = cu_global.data();
  nvte_cp_thd_get_partitioned_indices(handle, output.data(), 12, 2, 0, nullptr);
  EXPECT_EQ(indices, (std::vector<int32_t>{0, 1, 6, 7, 8, 11}));
  nvte_cp_thd_get_partitioned_indices(handle, output.data(), 12, 2, 1, nullptr);
  EXPECT_EQ(indices, (std::vector<int32_t>{2, 3, 4, 5, 9, 10}));
}

TEST_F(CpThd, Refuses) {
  Buffer x(TEA_FP16, kTokens * kRow), lse(TEA_FP32, 20);
  const TensorWrapper whole = handle_of(x, {kTokens, kHeads, kDim});
  const TensorWrapper lines = handle_of(lse, {2, kHeads, 5});
  const NVTETensor xh = whole.data(), lh = lines.data(), null = nullptr;
  const auto grad = [&](const char* first, const char* second) {
    nvte_cp_thd_grad_correction(whole.data(), xh, cu_handle, first, second, nullptr);
  };
  EXPECT_NVTE_ERROR(grad("none", "none"), "second is 0; needs another action than first");
  EXPECT_NVTE_ERROR(grad("add", "add"), "second is 1; needs another action than first");
  EXPECT_NVTE_ERROR(grad("mul", "add"), "first_half is mul; needs \"add\", \"copy\" or \"none\"");
  EXPECT_NVTE_ERROR(grad("add", nullptr), "second_half is NULL; needs");
  EXPECT_NVTE_ERROR(nvte_cp_thd_read_half_tensor(xh, cu_handle, whole.data(), 2, nullptr),
                    "half_idx is 2; needs 0 or 1");
  EXPECT_NVTE_ERROR(nvte_cp_thd_read_half_tensor(xh, xh, whole.data(), 1, nullptr),
                    "cu_seqlens.dtype is 5; needs kNVTEInt32");
  EXPECT_NVTE_ERROR(nvte_cp_thd_read_half_tensor(null, cu_handle, whole.data(), 1, nullptr),
                    "Invalid tensor.");
  EXPECT_NVTE_ERROR(nvte_cp_thd_read_second_half_lse(lh, cu_handle, lines.data(), 0, 3, nullptr),
                    "second_half_lse_seqlen is 3; needs 2");
  EXPECT_NVTE_ERROR(nvte_cp_thd_second_half_lse_correction(lines.data(), lh, cu_handle, 0, nullptr),
                    "lse_per_step.shape[-1] is 5; needs 2");
  EXPECT_NVTE_ERROR(nvte_cp_thd_out_correction(whole.data(), xh, lh, lh, cu_handle, 1, 1, nullptr),
                    "lse.ndim is 3; needs 2");
  std::vector<int32_t> odd = {0, 3, 6}, indices(6);
  const TensorWrapper bad = ints(odd), output = ints(indices);
  const NVTETensor bad_handle = bad.data();
  EXPECT_NVTE_ERROR(nvte_cp_thd_read_half_tensor(xh, bad_handle, whole.data(), 1, nullptr),
                    "cu_seqlens is out of range in part");
  const auto partition = [&](const NVTETensor& handle, int total, int world, int rank) {
    nvte_cp_thd_get_partitioned_indices(handle, output.data(), total, world, rank, nullptr);
  };
  EXPECT_NVTE_ERROR(partition(cu_handle, 0, 1, 0), "total_tokens is 0; needs 1 or more");
  EXPECT_NVTE_ERROR(partition(cu_handle, 6, 0, 0), "world_size is 0; needs 1 or more");
  EXPECT_NVTE_ERROR(partition(cu_handle, 6, 2, 0), "tokens is 6; needs a multiple of 2 * world");
  EXPECT_NVTE_ERROR(partition(cu_handle, 6, 1, 1), "rank is 1; needs 0 .. world - 1 = 0");
  EXPECT_NVTE_ERROR(partition(bad_handle, 6, 1, 0), "cu_seqlens is out of range in part");
}

}  // namespace
}  // namespace tea
