// plan_portable and workspace: what the portable engine takes on, and where.
#include <gtest/gtest.h>

#include "kit/answer.h"
#include "portable/engine.h"

namespace tea::portable {
namespace {

std::string answer(const std::string& text, const Device& device = kit::kH200) {
  return kit::answer(
      kPortable, text + " heads_q=2 heads_kv=2 dim_qk=64 batch=1 seqlen_q=9 seqlen_kv=9", device);
}

TEST(Portable, RunsOnGpusFromSm80On) {
  Device old = kit::kH200;
  old.sm = 75;
  EXPECT_EQ(answer("dtype=bf16"), "accepts");
  EXPECT_EQ(answer("dtype=bf16", Device{}), "device is the host; it runs on a GPU");
  EXPECT_EQ(answer("dtype=bf16", old), "device is sm_75; needs sm_80 or later");
}

TEST(Portable, TakesEveryTypeButDoublePrecision) {
  for (const char* dtype : {"fp16", "bf16", "fp32", "e4m3", "e5m2"})
    EXPECT_EQ(answer(std::string("dtype=") + dtype), "accepts");
  EXPECT_NE(answer("dtype=fp64").find("dtype is fp64; needs "), std::string::npos);
}

// When planned, not when run: a plan for training must be able to go backward.
TEST(Portable, WritesWiderResultsThanTheInputsButReadsNoWiderGradient) {
  EXPECT_EQ(answer("dtype=bf16 o_dtype=fp32"), "accepts");
  EXPECT_EQ(answer("dtype=bf16 training=1 o_dtype=fp32 dout_dtype=bf16"), "accepts");
  EXPECT_EQ(answer("dtype=fp16 training=1 dqkv_dtype=fp32"), "accepts");
  EXPECT_EQ(answer("dtype=bf16 training=1 o_dtype=fp32"), "dout_dtype is fp32; needs bf16, as q");
  EXPECT_EQ(answer("dtype=e4m3 o_dtype=bf16"), "accepts");
}

TEST(Portable, NeedsWorkspaceLinearInTheLengths) {
  const auto bytes = [](int64_t rows) {
    const Problem p =
        Problem::parse("dtype=bf16 training=1 heads_q=8 heads_kv=8 dim_qk=64 batch=1 seqlen_q=" +
                       std::to_string(rows) + " seqlen_kv=" + std::to_string(rows));
    const Geometry size = geometry(p, nullptr);
    return workspace(p, size, Direction::kForward) + workspace(p, size, Direction::kBackward);
  };
  EXPECT_LE(bytes(1 << 20), 2 * bytes(1 << 19) + (1 << 20));
}

}  // namespace
}  // namespace tea::portable
