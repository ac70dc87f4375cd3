// plan_avx512_bf16: products of pairs of bf16 numbers against the oracle, with every option;
// decoding of the types that it has kernels for.
#include "cpu/flash.h"
#include "cpu/fuzz.h"

namespace tea::cpu {
namespace {

TEST(FlashAvx512Bf16, RandomCasesAgreeWithTheOracle) {
  expect_set_agrees("cpu-avx512-bf16", kAvx512Bf16.available(), 500000);
}

TEST(FlashAvx512Bf16, RefusesDevices) {
  EXPECT_TRUE(std::holds_alternative<Refusal>(plan_avx512_bf16(Problem{}, Device{0, 90})));
}

// Head dimensions that end anywhere in 64 elements, rows of queries in every grouping, odd numbers
// of keys, keys apart and in pages.
TEST(FlashAvx512Bf16, FewRows) {
  if (!kAvx512Bf16.available()) GTEST_SKIP() << "this processor lacks the instructions";
  for (const char* type : {"dtype=bf16", "dtype=e4m3", "dtype=e5m2"})
    for (const char* dims : {"8", "40", "64 dim_v=72", "200 dim_v=264"})
      for (const char* keys : {"seqlen_kv=1", "seqlen_kv=63", "seqlen_kv=530 window_left=500"})
        for (const char* heads : {"1", "4", "7", "16"}) {
          const kit::Report report = kit::check(
              kit::Case::parse(std::string(type) + " heads_kv=1 heads_q=" + heads +
                               " dim_qk=" + dims + " batch=1 seqlen_q=1 " + keys +
                               " bottom_right=1 outputs=lse+max | seed=6 values=outliers"),
              "cpu-avx512-bf16");
          EXPECT_TRUE(report.ok()) << report.text();
        }
}

// Memory adjacent to a key must not be read, and the key beyond an odd one counts as zero: 0 times
// an infinity would be NaN.
TEST(FlashAvx512Bf16, AnInfiniteLastValueStaysInfinite) {
  if (!kAvx512Bf16.available()) GTEST_SKIP() << "this processor lacks the instructions";
  for (const char* type : {"dtype=bf16", "dtype=e5m2"})
    for (const char* values : {"extreme", "maxfinite"}) {
      const kit::Report report = kit::check(
          kit::Case::parse(std::string(type) +
                           " heads_kv=2 heads_q=4 dim_qk=64 batch=2 seqlen_q=1 seqlen_kv=65 | "
                           "seed=6 values=" +
                           values),
          "cpu-avx512-bf16");
      EXPECT_TRUE(report.ok()) << report.text();
    }
}

}  // namespace
}  // namespace tea::cpu
