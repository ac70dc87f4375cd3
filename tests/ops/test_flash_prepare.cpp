// Interleaved QKV, against the index formulas, and there and back again.
#include "buffer.h"
#include "ops/flash_prepare.h"

namespace tea {
namespace {

constexpr int64_t kSeqlen = 4, kBatch = 3, kHeads = 2, kDim = 5;
constexpr int64_t kCount = kSeqlen * kBatch * kHeads * kDim;

tea_flash_prepare arguments(int32_t dtype, Buffer& output) {
  tea_flash_prepare a{};
  a.struct_size = sizeof a;
  a.dtype = dtype;
  a.output = output.data();
  a.seqlen = kSeqlen, a.batch = kBatch, a.heads = kHeads, a.dim = kDim;
  return a;
}

TEST(FlashPrepare, ForwardSplitsEveryHead) {
  std::mt19937_64 random(1);
  for (int32_t dtype : kEveryDtype) {
    Buffer qkvi = random_buffer(dtype, 3 * kCount, random), qkv(dtype, 3 * kCount);
    tea_flash_prepare a = arguments(dtype, qkv);
    a.input[0] = qkvi.data();
    flash_prepare_forward(a, {});
    for (int64_t i = 0; i < 3 * kCount; ++i) {
      const int64_t c = i % kDim, n = i / kDim % kHeads, s = i / (kDim * kHeads) % kSeqlen;
      const int64_t b = i / (kDim * kHeads * kSeqlen) % kBatch, w = i / kCount;
      ASSERT_EQ(qkv[i], qkvi[((s * kBatch + b) * kHeads + n) * 3 * kDim + w * kDim + c]);
    }
  }
}

TEST(FlashPrepare, BackwardIsTheWayBack) {
  std::mt19937_64 random(2);
  for (int32_t dtype : kEveryDtype) {
    Buffer qkvi = random_buffer(dtype, 3 * kCount, random);
    Buffer qkv(dtype, 3 * kCount), back(dtype, 3 * kCount);
    tea_flash_prepare a = arguments(dtype, qkv);
    a.input[0] = qkvi.data();
    flash_prepare_forward(a, {});
    a = arguments(dtype, back);
    for (int w = 0; w < 3; ++w)
      a.input[w] = static_cast<char*>(qkv.data()) + static_cast<size_t>(w) * qkv.bytes() / 3;
    flash_prepare_backward(a, {});
    EXPECT_TRUE(back == qkvi) << dtype_name(dtype);
  }
}

TEST(FlashPrepare, NamesWhatIsWrong) {
  Buffer output(TEA_FP16, 3 * kCount);
  const auto error = [&](void (*run)(const tea_flash_prepare&, const Place&), auto change) {
    tea_flash_prepare a = arguments(TEA_FP16, output);
    a.input[0] = a.input[1] = a.input[2] = output.data();
    change(a);
    return error_of([&] { run(a, {}); });
  };
  EXPECT_EQ(error(flash_prepare_forward, [](auto&) {}),
            "input[1] is a pointer; needs NULL in forward");
  EXPECT_EQ(error(flash_prepare_backward, [](auto& a) { a.input[2] = nullptr; }),
            "input[2] is NULL; needs memory");
  EXPECT_EQ(error(flash_prepare_backward, [](auto& a) { a.dtype = -1; }),
            "dtype is -1; needs one of fp16, bf16, fp32, fp64, e4m3, e5m2");
  EXPECT_EQ(error(flash_prepare_backward, [](auto& a) { a.dim = -1; }),
            "dim is -1; needs 0 or more");
  EXPECT_EQ(error(flash_prepare_backward, [](auto& a) { a.seqlen = 0, a.output = nullptr; }), "");
}

}  // namespace
}  // namespace tea
