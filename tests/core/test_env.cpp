// settings, setting, setting_now, setting_on. The environment is read once per process, so each
// case is a child.
#include <gtest/gtest.h>

#include <cstdlib>

#include "core/env.h"

namespace tea {
namespace {

// What a setting reads as in a process that starts with `variable` = `value`.
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
  expect_in_child("TE_ATTENTION_DETERMINISTIC", "1", Setting::kDeterministic, "1", true);
  expect_in_child("TE_ATTENTION_DETERMINISTIC", "0", Setting::kDeterministic, "0", false);
  expect_in_child("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", Setting::kDeterministic, "1", true);
  expect_in_child("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", Setting::kDeterministic, "", false);
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

TEST(Env, AtMostFourVariablesOfOurOwn) {
  size_t own = 0;
  for (const SettingRow& row : settings())
    own += std::string_view(row.variable).starts_with("TE_ATTENTION_");
  EXPECT_LE(own, 4u);
}

}  // namespace
}  // namespace tea
