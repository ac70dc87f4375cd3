// thd <-> bshd against the index formula, with gaps, clamps, strides and round trips.
#include "buffer.h"
#include "ops/thd.h"

namespace tea {
namespace {

constexpr int64_t kBatch = 4, kSeqlen = 5, kTokens = 13, kHeads = 3, kDim = 2;
constexpr int64_t kRow = kHeads * kDim;
const std::vector<int32_t> kCu = {0, 3, 3, 8, 9};         // lengths 3, 0, 5, 1
const std::vector<int32_t> kOffsets = {1, 13, 7, 5, 13};  // neither dense nor ascending

tea_thd_convert arguments(int32_t dtype, Buffer& input, Buffer& output, bool gaps) {
  tea_thd_convert a{};
  a.struct_size = sizeof a;
  a.dtype = dtype;
  a.input = input.data(), a.output = output.data();
  a.cu_seqlens = kCu.data(), a.offsets = gaps ? kOffsets.data() : nullptr;
  a.batch = kBatch, a.seqlen = kSeqlen, a.tokens = kTokens, a.heads = kHeads, a.dim = kDim;
  return a;
}

int64_t token(bool gaps, int64_t i, int64_t q) { return (gaps ? kOffsets : kCu)[i] + q; }

TEST(Thd, ToBshdInEveryDtype) {
  std::mt19937_64 random(1);
  for (int32_t dtype : kEveryDtype)
    for (bool gaps : {false, true})
      for (bool zero : {false, true}) {
        Buffer thd = random_buffer(dtype, kTokens * kRow, random);
        Buffer bshd(dtype, kBatch * kSeqlen * kRow);
        tea_thd_convert a = arguments(dtype, thd, bshd, gaps);
        a.zero_fill = zero;
        thd_to_bshd(a, {});
        for (int64_t i = 0; i < kBatch; ++i)
          for (int64_t q = 0; q < kSeqlen; ++q)
            for (int64_t e = 0; e < kRow; ++e) {
              const int64_t at = (i * kSeqlen + q) * kRow + e;
              if (q < kCu[i + 1] - kCu[i])
                ASSERT_EQ(bshd[at], thd[token(gaps, i, q) * kRow + e]);
              else if (zero)
                ASSERT_EQ(bshd[at], 0);
              else
                ASSERT_TRUE(bshd.untouched(at));
            }
      }
}

TEST(Thd, RoundTripKeepsTokensAndZeroesGaps) {
  std::mt19937_64 random(2);
  for (int32_t dtype : kEveryDtype)
    for (bool zero : {false, true}) {
      Buffer thd = random_buffer(dtype, kTokens * kRow, random);
      Buffer bshd(dtype, kBatch * kSeqlen * kRow), back(dtype, kTokens * kRow);
      thd_to_bshd(arguments(dtype, thd, bshd, true), {});
      tea_thd_convert a = arguments(dtype, bshd, back, true);
      a.zero_fill = zero;
      bshd_to_thd(a, {});
      std::vector<bool> valid(kTokens, false);
      for (int64_t i = 0; i < kBatch; ++i)
        for (int64_t q = 0; q < kCu[i + 1] - kCu[i]; ++q) valid[token(true, i, q)] = true;
      for (int64_t e = 0; e < kTokens * kRow; ++e) {
        if (valid[e / kRow])
          ASSERT_EQ(back[e], thd[e]);
        else if (zero)
          ASSERT_EQ(back[e], 0);
        else
          ASSERT_TRUE(back.untouched(e));
      }
    }
}

TEST(Thd, StridesGiveSbhd) {
  std::mt19937_64 random(3);
  Buffer thd = random_buffer(TEA_FP32, kTokens * kRow, random);
  Buffer sbhd(TEA_FP32, kBatch * kSeqlen * kRow), bhsd(TEA_FP32, kBatch * kSeqlen * kRow);
  tea_thd_convert a = arguments(TEA_FP32, thd, sbhd, false);
  a.bshd_stride = {kRow, kBatch * kRow, kDim};
  thd_to_bshd(a, {});
  a.output = bhsd.data();
  a.bshd_stride = {kSeqlen * kRow, kDim, kSeqlen * kDim};
  thd_to_bshd(a, {});
  for (int64_t q = 0; q < 5; ++q)
    for (int64_t h = 0; h < kHeads; ++h)
      for (int64_t d = 0; d < kDim; ++d) {
        const double value = thd[(kCu[2] + q) * kRow + h * kDim + d];
        EXPECT_EQ(sbhd[(q * kBatch + 2) * kRow + h * kDim + d], value);
        EXPECT_EQ(bhsd[((2 * kHeads + h) * kSeqlen + q) * kDim + d], value);
      }
}

TEST(Thd, InvalidValuesAreClampedAndReported) {
  const std::vector<int32_t> bad[] = {
      {0, -3, 3, 8, 9}, {0, 9, 9, 10, 11}, {0, 3, 3, 8, 2000000000}, {-7, 3, 3, 8, 9}};
  std::mt19937_64 random(4);
  for (const std::vector<int32_t>& cu : bad) {
    Buffer thd = random_buffer(TEA_FP16, kTokens * kRow, random);
    Buffer bshd(TEA_FP16, kBatch * kSeqlen * kRow);
    int32_t status = 0;
    tea_thd_convert a = arguments(TEA_FP16, thd, bshd, false);
    a.cu_seqlens = cu.data(), a.status = &status;
    thd_to_bshd(a, {});
    EXPECT_EQ(status, TEA_STATUS_BAD_LENGTHS);
    a = arguments(TEA_FP16, bshd, thd, false);
    a.cu_seqlens = cu.data();
    bshd_to_thd(a, {});
  }
}

TEST(Thd, NamesWhatIsWrong) {
  Buffer thd(TEA_FP16, kTokens * kRow), bshd(TEA_FP16, kBatch * kSeqlen * kRow);
  const auto error = [&](auto change) {
    tea_thd_convert a = arguments(TEA_FP16, thd, bshd, false);
    change(a);
    return error_of([&] { thd_to_bshd(a, {}); });
  };
  EXPECT_EQ(error([](auto& a) { a.dtype = 0; }),
            "dtype is default; needs one of fp16, bf16, fp32, fp64, e4m3, e5m2");
  EXPECT_EQ(error([](auto& a) { a.zero_fill = 2; }), "zero_fill is 2; needs 0 or 1");
  EXPECT_EQ(error([](auto& a) { a.reserved = 1; }), "reserved is 1; needs 0");
  EXPECT_EQ(error([](auto& a) { a.seqlen = -4; }), "seqlen is -4; needs 0 or more");
  EXPECT_EQ(error([](auto& a) { a.input = nullptr; }), "input is NULL; needs memory");
  EXPECT_EQ(error([](auto& a) { a.cu_seqlens = nullptr; }), "cu_seqlens is NULL; needs memory");
  EXPECT_EQ(error([](auto& a) { a.thd_stride.head = -1; }),
            "thd_stride is -1; needs 0 or more elements");
}

}  // namespace
}  // namespace tea
