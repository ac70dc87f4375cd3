// Sizes and strides: default_geometry and geometry against layouts written out by hand.
#include <gtest/gtest.h>

#include "core/error.h"
#include "core/geometry.h"

namespace tea {
namespace {

std::string text(const tea_strides& s) {
  return std::to_string(s.batch) + "," + std::to_string(s.seq) + "," + std::to_string(s.head);
}
std::string text(const tea_bias_strides& s) {
  return std::to_string(s.batch) + "," + std::to_string(s.head) + "," + std::to_string(s.row) +
         "," + std::to_string(s.col);
}
tea_run sized(int64_t batch, int64_t max_q, int64_t max_kv) {
  tea_run run{};
  run.struct_size = sizeof run;
  run.batch = batch, run.max_q = max_q, run.max_kv = max_kv;
  return run;
}

TEST(Geometry, DenseDefaultsAreBshd) {
  const Problem p = Problem::parse(
      "dtype=fp32 batch=3 seqlen_q=5 seqlen_kv=7 heads_q=4 heads_kv=2 dim_qk=16 dim_v=8");
  const Geometry g = geometry(p, nullptr);
  EXPECT_EQ(text(g.q), "320,64,16");  // [3][5][4][16]
  EXPECT_EQ(text(g.k), "224,32,16");  // [3][7][2][16]
  EXPECT_EQ(text(g.v), "112,16,8");   // [3][7][2][8]
  EXPECT_EQ(text(g.o), "160,32,8");   // [3][5][4][8]
  EXPECT_EQ(text(g.dout), text(g.o));
  EXPECT_EQ(text(g.dq), text(g.q));
  EXPECT_EQ(text(g.lse), "20,1,5");  // [3][4][5]
}

TEST(Geometry, RaggedDefaultsAreThd) {
  const Problem p = Problem::parse(
      "dtype=fp32 q_form=ragged kv_form=ragged heads_q=4 heads_kv=2 dim_qk=16 bias=post_scale");
  tea_run run = sized(3, 5, 7);
  run.tokens_q = 11, run.tokens_kv = 13;
  const Geometry g = geometry(p, &run);
  EXPECT_EQ(text(g.q), "0,64,16");
  EXPECT_EQ(text(g.k), "0,32,16");
  EXPECT_EQ(text(g.lse), "0,4,1");
  EXPECT_EQ(text(g.bias), "140,35,7,1");
  EXPECT_EQ(g.batch, 3);
  EXPECT_EQ(g.tokens_q, 11);
}

TEST(Geometry, PagedDefaultsAndTables) {
  const Problem p = Problem::parse(
      "dtype=fp32 kv_form=paged page_size=4 seqlen_q=1 heads_q=4 heads_kv=2 dim_qk=16");
  tea_run run = sized(3, 0, 9);
  run.pages_k = 20, run.pages_v = 21;
  const Geometry g = geometry(p, &run);
  EXPECT_EQ(text(g.k), "128,32,16");  // [page][4][2][16]
  EXPECT_EQ(g.table_pages, 3);
  EXPECT_EQ(g.table_k, 3);
  EXPECT_EQ(g.table_v, 3);
}

TEST(Geometry, BroadcastDimensionsHaveNoStride) {
  const Problem p = Problem::parse(
      "dtype=fp32 batch=3 seqlen_q=5 seqlen_kv=7 heads_q=4 heads_kv=4 dim_qk=16 bias=post_scale "
      "bias_broadcast=batch+row");
  EXPECT_EQ(text(geometry(p, nullptr).bias), "0,7,0,1");
}

TEST(Geometry, SizesThatARunLeavesOutAreRefused) {
  const Problem ragged =
      Problem::parse("dtype=fp32 q_form=ragged kv_form=ragged heads_q=1 heads_kv=1 dim_qk=8");
  EXPECT_THROW(geometry(ragged, nullptr), Error);
  const Problem dense =
      Problem::parse("dtype=fp32 batch=1 seqlen_q=1 seqlen_kv=1 heads_q=1 heads_kv=1 dim_qk=8");
  const tea_run run = sized(1, 0, 0);
  EXPECT_THROW(geometry(dense, &run), Error);
}

TEST(Geometry, SixtyFourBitExtents) {
  const Problem p = Problem::parse(
      "dtype=bf16 batch=70000 seqlen_q=1 seqlen_kv=5000000 heads_q=8 heads_kv=8 dim_qk=128");
  const Geometry g = default_geometry(p);
  EXPECT_EQ(g.k.batch, int64_t{5000000} * 8 * 128);
  EXPECT_NO_THROW(check_strides(p));
  EXPECT_NO_THROW(geometry(p, nullptr));
  Problem huge = p;
  huge.seqlen_kv = int64_t{1} << 58;
  EXPECT_THROW(geometry(huge, nullptr), Error);
}

// Products of sizes beyond 64 bits must not wrap around to something that looks small.
TEST(Geometry, SizesWhoseProductOverflowsAreRefused) {
  const std::string base = "dtype=fp32 heads_q=1 heads_kv=1 dim_qk=8 ";
  for (const char* sizes :
       {"batch=1 seqlen_q=1152921504606846976 seqlen_kv=1",
        "batch=1 seqlen_q=1 seqlen_kv=2305843009213693952",
        "batch=9223372036854775807 seqlen_q=1 seqlen_kv=1 q=9223372036854775807,"
        "9223372036854775807,9223372036854775807",
        "batch=2 seqlen_q=4294967296 seqlen_kv=4294967296 bias=post_scale"})
    EXPECT_THROW(geometry(Problem::parse(base + sizes), nullptr), Error) << sizes;
  Problem paged = Problem::parse(base + "kv_form=paged page_size=2 outputs=lse");
  tea_run run = sized(1, 0, INT64_MAX);
  run.pages_k = run.pages_v = 1;
  EXPECT_THROW(geometry(paged, &run), Error) << "a table without end";
  run.max_kv = 3;
  EXPECT_EQ(geometry(paged, &run).table_pages, 2);
  paged.table_k_stride = INT64_MAX;
  run.batch = 4;
  EXPECT_THROW(geometry(paged, &run), Error) << "a table wider than memory";
}

}  // namespace
}  // namespace tea
