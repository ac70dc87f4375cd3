// settings, setting, setting_now, setting_on. The environment is read once per process, so each
// case is a child.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>

#include "core/env.h"
#include "te_attention.h"

namespace tea {
namespace {

// Checks the text of a setting in a process that starts with `variable` = `value`.
void expect_in_child(const char* variable, const char* value, Setting which, const char* text,
                     bool on) {
  EXPECT_EXIT(
      {
        setenv(variable, value, 1);
        std::exit(setting(which) == text && setting_on(which) == on ? 0 : 1);
      },
      testing::ExitedWithCode(0), "")
      << variable << "=" << value;
}

TEST(Env, OwnVariablesAndAliases) {
  expect_in_child("TE_ATTENTION_ENGINE", "reference", Setting::kEngine, "reference", true);
  expect_in_child("TE_ATTENTION_CHECK", "1", Setting::kCheck, "1", true);
  expect_in_child("TE_ATTENTION_CHECK", "0", Setting::kCheck, "0", false);
  expect_in_child("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", Setting::kNondeterministic, "0", false);
  expect_in_child("NVTE_DEBUG", "1", Setting::kLog, "1", true);
  expect_in_child("NVTE_FUSED_ATTN_BACKEND", "0", Setting::kFusedAttnBackend, "0", false);
  expect_in_child("NVTE_FUSED_ATTN_BACKEND", "1", Setting::kFusedAttnBackend, "1", true);
  expect_in_child("UNRELATED", "1", Setting::kLog, "", false);
}

TEST(Env, SomeSettingsMayChangeInAProcess) {
  EXPECT_EXIT(
      {
        setenv("NVTE_FUSED_ATTN_BACKEND", "0", 1);
        const bool first = setting_now(Setting::kFusedAttnBackend) == "0";
        setenv("NVTE_FUSED_ATTN_BACKEND", "1", 1);
        std::exit(first && setting_now(Setting::kFusedAttnBackend) == "1" ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

// A text that does not say 0 must not leave a caller without the determinism that was wanted.
TEST(Env, TextsOtherThan0And1ForDeterminismAreRefused) {
  for (const auto& [text, refused] : {std::pair{"no", true},
                                      {"false", true},
                                      {"2", true},
                                      {"", false},
                                      {"0", false},
                                      {"1", false}})
    EXPECT_EXIT(
        {
          setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", text, 1);
          tea_problem problem{};
          problem.struct_size = sizeof problem;
          problem.dtype = TEA_FP32;
          problem.heads_q = problem.heads_kv = problem.batch = 1;
          problem.seqlen_q = problem.seqlen_kv = problem.dim_qk = 8;
          tea_plan* plan = nullptr;
          const bool ran = tea_plan_create(&problem, -1, nullptr, &plan) == TEA_OK;
          const std::string expected =
              "NVTE_ALLOW_NONDETERMINISTIC_ALGO is " + std::string(text) + "; needs 0 or 1";
          std::exit(ran != refused && (ran || tea_error() == expected) ? 0 : 1);
        },
        testing::ExitedWithCode(0), "")
        << text;
}

TEST(Env, FrontEndsReadTheTable) {
  EXPECT_EXIT(
      {
        setenv("TE_ATTENTION_CHECK", "1", 1);
        const bool found = std::string_view(tea_setting("TE_ATTENTION_CHECK")) == "1";
        std::exit(found && *tea_setting("TE_ATTENTION_THREADS") == 0 ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
  EXPECT_EQ(tea_setting("PATH"), nullptr);
  EXPECT_EQ(tea_setting(nullptr), nullptr);
}

TEST(Env, AtMostFourVariablesOfOurOwn) {
  size_t own = 0;
  for (const SettingRow& row : settings())
    own += std::string_view(row.variable).starts_with("TE_ATTENTION_");
  EXPECT_LE(own, 4u);
}

}  // namespace
}  // namespace tea
