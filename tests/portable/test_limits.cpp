// backward_limit: the largest sizes that pass, and what is said of the next ones, when a problem is
// planned and where only a run knows them.
#include <gtest/gtest.h>

#include "core/error.h"
#include "portable/backward/backward.h"
#include "portable/backward/limits.h"
#include "portable/engine.h"

namespace tea::portable {
namespace {

constexpr Device kGpu{.index = 0, .sm = 90, .num_sms = 132, .shared_bytes = 227 << 10};
constexpr const char* kRagged =
    "dtype=bf16 training=1 q_form=ragged kv_form=ragged heads_q=2 heads_kv=1 dim_qk=64";

Problem dense(const std::string& sizes) {
  return Problem::parse("dtype=bf16 training=1 dim_qk=64 heads_kv=1 " + sizes);
}
std::string limit(const std::string& sizes) {
  const Problem p = dense(sizes);
  return backward_limit(p, default_geometry(p));
}

TEST(BackwardLimit, RowsOfASequenceAreBelowTwoToThe30) {
  EXPECT_EQ(limit("batch=1 heads_q=1 seqlen_q=1073741823 seqlen_kv=1073741823"), "");
  EXPECT_EQ(limit("batch=1 heads_q=1 seqlen_q=1073741824 seqlen_kv=9"),
            "seqlen_q is 1073741824; backward needs at most 1073741823");
  EXPECT_EQ(limit("batch=1 heads_q=1 seqlen_q=9 seqlen_kv=1073741824"),
            "seqlen_kv is 1073741824; backward needs at most 1073741823");
}

TEST(BackwardLimit, RowsOfAllHeadsFit32Bits) {
  EXPECT_EQ(limit("batch=1 heads_q=15 seqlen_q=268435456 seqlen_kv=9"), "");
  EXPECT_EQ(limit("batch=1 heads_q=16 seqlen_q=268435456 seqlen_kv=9"),
            "heads_q is 16; backward needs at most 15 where seqlen_q is 268435456");
}

TEST(BackwardLimit, BlocksFitAGrid) {
  EXPECT_EQ(limit("batch=134217727 heads_q=16 seqlen_q=64 seqlen_kv=9"), "");
  EXPECT_EQ(
      limit("batch=134217728 heads_q=16 seqlen_q=64 seqlen_kv=9"),
      "batch is 134217728; backward needs at most 134217727 where seqlen_q is 64 and heads_q 16");
}

TEST(BackwardLimit, BatchesWithoutRowsHaveNone) {
  EXPECT_EQ(limit("batch=1000000000000 heads_q=16"), "");
}

TEST(BackwardLimit, IsRefusedWhenTheProblemIsPlanned) {
  Problem p = dense("batch=1 heads_q=1 seqlen_q=1073741824 seqlen_kv=9");
  const Attempt attempt = kPortable.attempt(p, kGpu);
  ASSERT_TRUE(std::holds_alternative<Refusal>(attempt));
  EXPECT_EQ(std::get<Refusal>(attempt).why,
            "seqlen_q is 1073741824; backward needs at most 1073741823");
  p.training = 0;  // the forward pass has no limit
  EXPECT_FALSE(std::holds_alternative<Refusal>(kPortable.attempt(p, kGpu)));
}

TEST(BackwardLimit, SizesOfARunAreRefusedBeforeAnythingIsLaunched) {
  const Problem p = Problem::parse(kRagged);
  EXPECT_FALSE(std::holds_alternative<Refusal>(kPortable.attempt(p, kGpu)));
  tea::Run run{};  // testing::Test has a Run of its own
  run.size = default_geometry(p);
  run.size.batch = 3, run.size.max_q = 9, run.size.max_kv = 1 << 30;
  try {
    backward(p, kGpu, run);
    FAIL() << "it ran";
  } catch (const Error& error) {
    EXPECT_EQ(error.status, TEA_UNSUPPORTED);
    EXPECT_STREQ(error.what(),
                 "portable: run.max_kv is 1073741824; backward needs at most 1073741823");
  }
}

}  // namespace
}  // namespace tea::portable
