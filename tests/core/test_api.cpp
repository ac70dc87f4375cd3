// The C API: statuses and error texts, text results, counted plans, and one small computation.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <string>
#include <thread>

#include "te_attention.h"

namespace {

tea_problem parsed(const char* text) {
  tea_problem p{};
  p.struct_size = sizeof p;
  EXPECT_EQ(tea_problem_parse(text, &p), TEA_OK) << tea_error();
  return p;
}
constexpr const char* kSmall =
    "dtype=fp32 heads_q=2 heads_kv=1 dim_qk=8 batch=1 seqlen_q=4 seqlen_kv=4 causal=1";

TEST(Api, TheFirstCausalRowSeesOnlyItself) {
  const tea_problem p = parsed(kSmall);
  alignas(16) std::array<float, 64> q, o;
  alignas(16) std::array<float, 32> k, v;
  for (size_t i = 0; i < 64; ++i) q[i] = std::sin(static_cast<float>(i));
  for (size_t i = 0; i < 32; ++i)
    k[i] = std::cos(static_cast<float>(i)), v[i] = static_cast<float>(i);
  std::array<void*, TEA_TENSOR_COUNT> tensors{q.data(), k.data(), v.data(), o.data()};
  tea_run run{};
  run.struct_size = sizeof run, run.tensor_count = TEA_TENSOR_COUNT, run.tensors = tensors.data();
  tea_plan* plan = nullptr;
  ASSERT_EQ(tea_plan_create(&p, -1, nullptr, &plan), TEA_OK) << tea_error();
  EXPECT_STREQ(tea_plan_engine(plan), "cpu");
  ASSERT_EQ(tea_forward(plan, &run), TEA_OK) << tea_error();
  for (size_t d = 0; d < 8; ++d) EXPECT_EQ(o[d], v[d]);
  EXPECT_EQ(tea_backward(plan, &run), TEA_INVALID);
  EXPECT_STREQ(tea_error(), "problem.training is 0; needs 1: the plan was not made for backward");
  tea_plan_release(plan);
  tea_plan_release(nullptr);
}

TEST(Api, TextResultsReportTheSizeTheyNeed) {
  const tea_problem p = parsed(kSmall);
  size_t needed = 0;
  ASSERT_EQ(tea_problem_print(&p, nullptr, 0, &needed), TEA_OK);
  EXPECT_EQ(needed, std::string(kSmall).size() + 1);
  std::string text(needed, '?');
  ASSERT_EQ(tea_problem_print(&p, text.data(), text.size(), nullptr), TEA_OK);
  EXPECT_STREQ(text.c_str(), kSmall);
  char small[6];
  ASSERT_EQ(tea_problem_print(&p, small, sizeof small, &needed), TEA_OK);
  EXPECT_STREQ(small, "dtype");
  EXPECT_EQ(tea_problem_print(&p, nullptr, 5, nullptr), TEA_INVALID);
  text.resize(4096);
  ASSERT_EQ(tea_explain(&p, -1, text.data(), text.size(), nullptr), TEA_OK) << tea_error();
  EXPECT_NE(std::string(text.c_str()).find("cpu: accepts\n"), std::string::npos) << text;
}

TEST(Api, NullArgumentsAreNamed) {
  const tea_problem p = parsed(kSmall);
  tea_problem out{};
  tea_plan* plan;
  const struct {
    tea_status status;
    const char* error;
  } rows[] = {
      {tea_plan_create(nullptr, -1, nullptr, &plan), ""},
      {tea_plan_create(&p, -1, nullptr, nullptr), ""},
      {tea_forward(nullptr, nullptr), ""},
      {tea_problem_parse(nullptr, &out), ""},
      {tea_problem_parse("", nullptr), ""},
      {tea_problem_cost(&p, nullptr, nullptr), ""},
      {tea_cache_stats(nullptr), ""},
  };
  for (const auto& row : rows) EXPECT_EQ(row.status, TEA_INVALID);
  tea_plan_create(nullptr, -1, nullptr, &plan);
  EXPECT_STREQ(tea_error(), "problem is NULL; needs a tea_problem");
  tea_forward(nullptr, nullptr);
  EXPECT_STREQ(tea_error(), "plan is NULL; needs a plan");
}

TEST(Api, DevicesAndEnginesThatDoNotExist) {
  const tea_problem p = parsed(kSmall);
  tea_plan* plan = nullptr;
  EXPECT_EQ(tea_plan_create(&p, -2, nullptr, &plan), TEA_INVALID);
  EXPECT_EQ(tea_plan_create(&p, 4096, nullptr, &plan), TEA_UNSUPPORTED);
  EXPECT_NE(std::string(tea_error()).find("device is 4096"), std::string::npos) << tea_error();
  EXPECT_EQ(tea_plan_create(&p, -1, "fastest", &plan), TEA_INVALID);
  EXPECT_NE(std::string(tea_error()).find("engine is \"fastest\"; needs one of"),
            std::string::npos);
  EXPECT_EQ(plan, nullptr);
}

TEST(Api, ErrorsBelongToTheirThread) {
  tea_forward(nullptr, nullptr);
  const std::string mine = tea_error();
  std::thread([] {
    EXPECT_STREQ(tea_error(), "");
    tea_problem p{};
    tea_problem_parse("invalid", &p);
  }).join();
  EXPECT_EQ(tea_error(), mine);
}

TEST(Api, CheckGivesTheCanonicalForm) {
  const tea_problem a = parsed(
      "dtype=bf16 batch=1 seqlen_q=4 seqlen_kv=4 heads_q=1 heads_kv=1 "
      "dim_qk=64 window_right=1 dim_v=64");
  tea_problem normal{};
  ASSERT_EQ(tea_problem_check(&a, &normal), TEA_OK) << tea_error();
  EXPECT_EQ(normal.causal, 1);
  EXPECT_EQ(normal.window_right, 0);
  EXPECT_EQ(normal.dim_v, 0);
  EXPECT_EQ(tea_problem_check(&a, nullptr), TEA_OK);
}

TEST(Api, CostAndWorkspaceAreFunctionsOfTheProblem) {
  const tea_problem p = parsed(kSmall);
  tea_cost cost{};
  ASSERT_EQ(tea_problem_cost(&p, nullptr, &cost), TEA_OK) << tea_error();
  EXPECT_EQ(cost.visible, 2u * 10u);
  uint64_t forward = 1, backward = 1;
  ASSERT_EQ(tea_workspace_bound(&p, nullptr, &forward, &backward), TEA_OK) << tea_error();
  EXPECT_EQ(backward, 0u);  // not a training problem
}

TEST(Api, APlanSaysWhatWorkspaceItNeeds) {
  const tea_problem dense = parsed(
      "dtype=bf16 heads_q=4 heads_kv=2 dim_qk=64 batch=2 seqlen_q=128 seqlen_kv=128 causal=1 "
      "training=1");
  uint64_t bound[2], needed[2];
  ASSERT_EQ(tea_workspace_bound(&dense, nullptr, &bound[0], &bound[1]), TEA_OK) << tea_error();
  for (const char* engine : {"", "cpu", "reference"}) {
    tea_plan* plan = nullptr;
    ASSERT_EQ(tea_plan_create(&dense, -1, engine, &plan), TEA_OK) << tea_error();
    needed[0] = needed[1] = ~uint64_t{0};
    EXPECT_EQ(tea_plan_workspace(plan, nullptr, &needed[0], &needed[1]), TEA_OK) << tea_error();
    EXPECT_LE(needed[0], bound[0]) << engine;
    EXPECT_LE(needed[1], bound[1]) << engine;
    EXPECT_EQ(tea_plan_workspace(plan, nullptr, nullptr, nullptr), TEA_OK);
    tea_plan_release(plan);
  }
  EXPECT_EQ(tea_plan_workspace(nullptr, nullptr, nullptr, nullptr), TEA_INVALID);
  EXPECT_STREQ(tea_error(), "plan is NULL; needs a plan");

  const tea_problem ragged =
      parsed("dtype=fp32 heads_q=1 heads_kv=1 dim_qk=8 q_form=ragged kv_form=ragged");
  tea_plan* plan = nullptr;
  ASSERT_EQ(tea_plan_create(&ragged, -1, nullptr, &plan), TEA_OK) << tea_error();
  EXPECT_EQ(tea_plan_workspace(plan, nullptr, &needed[0], nullptr), TEA_INVALID);
  EXPECT_NE(std::string(tea_error()).find("run is NULL"), std::string::npos) << tea_error();
  tea_run sizes{};
  sizes.struct_size = sizeof sizes;
  sizes.batch = 2, sizes.max_q = sizes.max_kv = 3, sizes.tokens_q = sizes.tokens_kv = 6;
  EXPECT_EQ(tea_plan_workspace(plan, &sizes, &needed[0], &needed[1]), TEA_OK) << tea_error();
  EXPECT_EQ(needed[1], 0u);  // not a training problem
  tea_plan_release(plan);
}

TEST(Api, TheCacheCanBeWatchedAndBounded) {
  tea_cache_info before{}, after{};
  ASSERT_EQ(tea_cache_limit(16), TEA_OK);
  ASSERT_EQ(tea_cache_stats(&before), TEA_OK);
  tea_problem p = parsed(kSmall);
  for (int64_t batch = 1; batch <= 100; ++batch) {
    p.batch = batch;
    tea_plan* plan;
    ASSERT_EQ(tea_plan_create(&p, -1, nullptr, &plan), TEA_OK);
    tea_plan_release(plan);
  }
  ASSERT_EQ(tea_cache_stats(&after), TEA_OK);
  EXPECT_EQ(after.capacity, 16u);
  EXPECT_LE(after.entries, 16u);
  EXPECT_GE(after.misses - before.misses, 99u);
}

TEST(Api, VersionsAgree) { EXPECT_STREQ(tea_version(), "0.1.0"); }

}  // namespace
