// View: addresses of rows, invalid lengths and page tables, missing scales.
#include <gtest/gtest.h>

#include <array>
#include <limits>

#include "cpu/view.h"

namespace tea::cpu {
namespace {

struct Bench {
  Problem p;
  Run run{};
  int32_t status = 0;

  Bench(const char* text, int64_t batch, int64_t max_q, int64_t max_kv) : p(Problem::parse(text)) {
    run.size.batch = batch, run.size.max_q = max_q, run.size.max_kv = max_kv;
    run.status = &status;
  }
};

TEST(View, LengthsAreClampedAndReported) {
  Bench t("dtype=fp32 q_form=padded heads_q=1 heads_kv=1 dim_qk=8", 4, 5, 0);
  std::array<int32_t, 5> cu{0, 3, 9, 8, 8};  // 3, 6 (too long), -1 (negative), 0
  t.run.tensor[TEA_CU_SEQLENS_Q] = cu.data();
  const View view(t.p, t.run);
  EXPECT_EQ(view.queries(0).length, 3);
  EXPECT_EQ(view.queries(3).length, 0);
  EXPECT_EQ(t.status, 0);
  EXPECT_EQ(view.queries(1).length, 5);
  EXPECT_EQ(t.status, TEA_STATUS_BAD_LENGTHS);
  EXPECT_EQ(view.queries(2).length, 0);
}

TEST(View, OriginsFromMemoryAreClampedAndReported) {
  Bench t("dtype=fp32 heads_q=1 heads_kv=1 dim_qk=8", 1, 1, 1);
  int64_t origin[4] = {1, 2, 3, 4};
  t.run.origin_device = origin;
  EXPECT_EQ(View(t.p, t.run).origin(0).column, 4);
  EXPECT_EQ(t.status, 0);
  origin[0] = -7, origin[2] = INT64_MAX;
  const View view(t.p, t.run);
  EXPECT_EQ(view.origin(0).batch, 0);
  EXPECT_EQ(view.origin(0).head, 2);
  EXPECT_EQ(view.origin(0).row, int64_t{1} << 40);
  EXPECT_EQ(t.status, TEA_STATUS_BAD_ORIGIN);
}

TEST(View, AScaleOfSThatSaturatesIsReported) {
  struct Row {
    const char* problem;
    float scale;
    bool saturates;
  };
  const Row rows[] = {{"dtype=e4m3", 448, false},
                      {"dtype=e4m3", 449, true},
                      {"dtype=e5m2", 57344, false},
                      {"dtype=e5m2", 60000, true},
                      {"dtype=e4m3 training=1 dropout=0.1", 448 * 0.9f, false},
                      {"dtype=e4m3 training=1 dropout=0.1", 404, true}};
  for (const Row& row : rows) {
    Bench t((std::string(row.problem) + " heads_q=1 heads_kv=1 dim_qk=8").c_str(), 1, 1, 1);
    int64_t rng[2] = {};
    float scale = row.scale;
    t.run.tensor[TEA_S_SCALE] = &scale;
    t.run.tensor[TEA_RNG_STATE] = rng;
    const View view(t.p, t.run);
    EXPECT_EQ(t.status, row.saturates ? TEA_STATUS_SATURATED : 0) << row.problem << row.scale;
  }
}

TEST(View, EachSequenceMayHaveAnOriginAndAShift) {
  Bench t("dtype=fp32 heads_q=1 heads_kv=1 dim_qk=8", 2, 1, 1);
  int64_t numbers[12] = {1, 2, 3, 4, -5, 99, 6, 7, 8, 9, int64_t{1} << 50, 99};
  t.run.origin_device = numbers, t.run.origin_stride = 6;
  const View view(t.p, t.run);
  EXPECT_EQ(view.origin(0).shift, -5);
  EXPECT_EQ(view.origin(1).row, 8);
  EXPECT_EQ(view.origin(1).shift, int64_t{1} << 40);
  EXPECT_EQ(t.status, TEA_STATUS_BAD_ORIGIN);
  t.run.origin_stride = 0, t.run.shift = 3;
  EXPECT_EQ(View(t.p, t.run).origin(1).shift, 3);
}

TEST(View, RaggedSequencesStayInsideTheBuffer) {
  Bench t("dtype=fp32 kv_form=ragged gaps=1 heads_q=1 heads_kv=1 dim_qk=8", 5, 0, 8);
  t.run.size.tokens_kv = 20;
  std::array<int32_t, 6> cu{0, 4, 8, 12, 12, 20};
  std::array<int32_t, 6> offsets{2, -1, 18, std::numeric_limits<int32_t>::max(), 12, 20};
  t.run.tensor[TEA_CU_SEQLENS_KV] = cu.data();
  t.run.tensor[TEA_OFFSETS_KV] = offsets.data();
  const View view(t.p, t.run);
  EXPECT_EQ(view.keys(0).start, 2);
  EXPECT_EQ(view.keys(0).length, 4);
  EXPECT_EQ(view.keys(3).length, 0);
  EXPECT_EQ(t.status, 0);             // an empty sequence may start anywhere
  EXPECT_EQ(view.keys(1).length, 0);  // starts before the buffer
  EXPECT_EQ(t.status, TEA_STATUS_BAD_LENGTHS);
  EXPECT_EQ(view.keys(2).length, 2);  // runs over the end
  EXPECT_EQ(view.keys(4).length, 8);
}

TEST(View, PagesAreFoundThroughTheTableAndClamped) {
  Bench t("dtype=fp32 kv_form=paged page_size=2 heads_q=1 heads_kv=1 dim_qk=8", 1, 0, 6);
  std::array<float, 4 * 2 * 8> pool{};
  for (size_t i = 0; i < pool.size(); ++i) pool[i] = static_cast<float>(i);
  std::array<int32_t, 3> table{3, 0, 99};
  t.run.size.k = {16, 8, 8};
  t.run.size.pages_k = 4, t.run.size.table_k = 3;
  t.run.tensor[TEA_K] = pool.data(), t.run.tensor[TEA_TABLE_K] = table.data();
  const View view(t.p, t.run);
  Reals row(8);
  const auto first = [&](int64_t i) {
    view.load(view.rows(TEA_K), {{}, 0, 0, i}, 2.0, row);
    return row[0];
  };
  EXPECT_EQ(first(0), 2 * 48);
  EXPECT_EQ(first(3), 2 * 8);
  EXPECT_EQ(t.status, 0);
  EXPECT_EQ(first(4), 2 * 48);  // page 99 does not exist: the last one stands in
  EXPECT_EQ(t.status, TEA_STATUS_BAD_PAGE);
}

TEST(View, MissingScalesAreOneOrTheirStandIn) {
  Bench t("dtype=e4m3 heads_q=1 heads_kv=1 dim_qk=8", 1, 1, 1);
  float q_scale = 3, dq_amax = 2, dk_amax = 1;
  t.run.tensor[TEA_Q_SCALE_INV] = &q_scale;
  t.run.tensor[TEA_DQ_AMAX] = &dq_amax, t.run.tensor[TEA_DK_AMAX] = &dk_amax;
  const View view(t.p, t.run);
  EXPECT_EQ(view.scalar(TEA_S_SCALE), 1);
  EXPECT_EQ(view.scalar(TEA_K_SCALE_INV), 3);
  view.raise(TEA_DK_AMAX, 5);
  EXPECT_EQ(dk_amax, 5);
  EXPECT_EQ(dq_amax, 2);
  view.raise(TEA_DV_AMAX, 7);
  EXPECT_EQ(dq_amax, 7);
  view.raise(TEA_DV_AMAX, 1);  // a maximum into what is there
  EXPECT_EQ(dq_amax, 7);
}

}  // namespace
}  // namespace tea::cpu
