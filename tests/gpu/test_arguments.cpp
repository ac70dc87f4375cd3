// The arguments of kernels, built from a Problem and a Run.
#include <gtest/gtest.h>

#include <array>

#include "gpu/arguments.h"

namespace tea {
namespace {

struct Bench {
  Problem p;
  Run run{};
  alignas(16) std::array<float, 64> memory{};

  explicit Bench(const char* text) : p(Problem::parse(text)) { run.size = default_geometry(p); }
  void give(tea_tensor t, int element) { run.tensor[t] = memory.data() + element; }
  AttentionArguments arguments() const { return make_arguments(p, run); }
};

TEST(Arguments, SaysWhereEightElementsCanBeReadInWidePieces) {
  Bench t("dtype=fp32 batch=1 seqlen_q=2 seqlen_kv=2 heads_q=1 heads_kv=1 dim_qk=8 k=16,10,8");
  t.give(TEA_Q, 0), t.give(TEA_K, 0), t.give(TEA_V, 1);
  EXPECT_TRUE(t.arguments().q.is_vectorizable);
  EXPECT_FALSE(t.arguments().k.is_vectorizable);  // rows begin 40 bytes apart
  EXPECT_FALSE(t.arguments().v.is_vectorizable);  // the first begins 4 bytes off
}

TEST(Arguments, FillsMissingScalesOfKeysAndValuesFromTheQueries) {
  Bench t("dtype=e4m3 batch=1 seqlen_q=2 seqlen_kv=2 heads_q=1 heads_kv=1 dim_qk=8 training=1");
  t.give(TEA_Q_SCALE_INV, 1), t.give(TEA_V_SCALE_INV, 2), t.give(TEA_DQ_AMAX, 3);
  const Fp8Scales s = t.arguments().fp8;
  EXPECT_EQ(s.k_inv, s.q_inv);
  EXPECT_EQ(s.v_inv, t.memory.data() + 2);
  EXPECT_EQ(s.dv_amax, t.memory.data() + 3);
  EXPECT_EQ(s.s, nullptr);
}

TEST(Arguments, ValuesUseTheTableOfTheKeysWhereTheyHaveNone) {
  Bench t("dtype=fp16 kv_form=paged page_size=4 heads_q=1 heads_kv=1 dim_qk=8");
  t.give(TEA_TABLE_K, 0);
  t.run.size.pages_k = 3, t.run.size.pages_v = 5, t.run.size.table_k = 7;
  EXPECT_EQ(t.arguments().page_table_v.entries, t.arguments().page_table_k.entries);
  EXPECT_EQ(t.arguments().page_table_v.stride, 7);
  EXPECT_EQ(t.arguments().page_table_v.pages, 5);
  t.give(TEA_TABLE_V, 1), t.run.size.table_v = 9;
  EXPECT_EQ(t.arguments().page_table_v.stride, 9);
}

TEST(Arguments, HasNoSequencesWhereADenseBatchHasNoRows) {
  Bench t("dtype=fp16 batch=1000000000000 heads_q=1 heads_kv=1 dim_qk=8");
  EXPECT_EQ(t.arguments().batch, 0);
}

TEST(Arguments, KnowsTheSequencesOfADenseBatch) {
  Bench t(
      "dtype=fp16 batch=2 seqlen_q=5 seqlen_kv=9 heads_q=1 heads_kv=1 dim_qk=8 causal=1 "
      "bottom_right=1 window_left=3");
  t.run.origin[2] = 100, t.run.origin[3] = 101;
  const AttentionArguments args = t.arguments();
  ASSERT_TRUE(args.is_uniform);
  EXPECT_EQ(args.uniform_pair.q.length, 5);
  EXPECT_EQ(args.uniform_pair.kv.length, 9);
  EXPECT_EQ(args.uniform_pair.diagonal, 4);
  EXPECT_EQ(args.uniform_pair.band.lo, 1);  // the diagonal is 4 - 1 to the right, the window 2 wide
  EXPECT_EQ(args.uniform_pair.band.hi, 3);
  EXPECT_EQ(args.uniform_pair.attended.begin, 1);
  EXPECT_EQ(args.uniform_pair.attended.end, 8);
}

TEST(Arguments, ShiftsTheDiagonalOfADenseBatch) {
  Bench t("dtype=fp16 batch=2 seqlen_q=5 seqlen_kv=9 heads_q=1 heads_kv=1 dim_qk=8 causal=1");
  t.run.shift = -2;
  const AttentionArguments args = t.arguments();
  ASSERT_TRUE(args.is_uniform);
  EXPECT_EQ(args.uniform_pair.diagonal, -2);
  EXPECT_EQ(args.uniform_pair.band.hi, -2);
  EXPECT_EQ(args.uniform_pair.attended.end, 3);  // of row 4
}

TEST(Arguments, LeavesSequencesToTheDeviceWhereMemoryThereSaysTheirPlace) {
  const int64_t origin[4] = {};
  Bench t("dtype=fp16 batch=2 seqlen_q=5 seqlen_kv=9 heads_q=1 heads_kv=1 dim_qk=8");
  t.run.origin_device = origin;
  EXPECT_FALSE(t.arguments().is_uniform);
  EXPECT_FALSE(Bench("dtype=fp16 q_form=padded batch=2 seqlen_q=5 seqlen_kv=9 heads_q=1 heads_kv=1 "
                     "dim_qk=8")
                   .arguments()
                   .is_uniform);
}

TEST(Arguments, DropsOnlyInTraining) {
  Bench t("dtype=fp16 batch=1 heads_q=1 heads_kv=1 dim_qk=8 training=1 dropout=0.5");
  t.give(TEA_RNG_STATE, 0);
  EXPECT_EQ(t.arguments().dropout_threshold, 32768u);
  EXPECT_EQ(t.arguments().keep_factor, 2);
  EXPECT_TRUE(t.arguments().has_dropout);
  t.p.training = 0;
  EXPECT_EQ(t.arguments().rng, nullptr);
  EXPECT_EQ(t.arguments().keep_factor, 1);
  EXPECT_FALSE(t.arguments().has_dropout);
}

}  // namespace
}  // namespace tea
