// The table of environment variables.
#include "core/env.h"

#include <array>
#include <cstdlib>
#include <cstring>

namespace tea {
namespace {

constexpr SettingRow kSettings[] = {
    {Setting::kEngine, "TE_ATTENTION_ENGINE", nullptr, nullptr,
     "name of the engine for every problem whose caller selects none"},
    {Setting::kLog, "TE_ATTENTION_LOG", "NVTE_DEBUG", "1",
     "1: each new plan prints its engine and problem to standard error"},
    {Setting::kThreads, "TE_ATTENTION_THREADS", nullptr, nullptr,
     "number of threads of the CPU engine, whatever its callers request"},
    {Setting::kOpenMp, "OMP_NUM_THREADS", nullptr, nullptr,
     "number of threads of the CPU engine by default; without it the cores of the process"},
    {Setting::kCheck, "TE_ATTENTION_CHECK", nullptr, nullptr,
     "1: front ends wait for each call on a GPU and raise if it reports invalid lengths or pages"},
    {Setting::kNondeterministic, "NVTE_ALLOW_NONDETERMINISTIC_ALGO", nullptr, nullptr,
     "0: every problem is deterministic"},
    {Setting::kFusedAttnBackend, "NVTE_FUSED_ATTN_BACKEND", nullptr, nullptr,
     "0: the nvte functions report the backend F16_max512_seqlen if it supports the problem"},
};

constexpr bool in_order() {
  for (size_t i = 0; i < std::size(kSettings); ++i)
    if (static_cast<size_t>(kSettings[i].setting) != i) return false;
  return true;
}
static_assert(in_order());

std::string read(const SettingRow& row) {
  if (const char* own = std::getenv(row.variable)) return own;
  const char* alias = row.alias ? std::getenv(row.alias) : nullptr;
  return alias && std::strcmp(alias, row.alias_means) == 0 ? "1" : "";
}

}  // namespace

std::span<const SettingRow> settings() { return kSettings; }

const std::string& setting(Setting which) {
  static const auto values = [] {
    std::array<std::string, std::size(kSettings)> out;
    for (size_t i = 0; i < out.size(); ++i) out[i] = read(kSettings[i]);
    return out;
  }();
  return values[static_cast<size_t>(which)];
}

std::string setting_now(Setting which) { return read(kSettings[static_cast<size_t>(which)]); }

bool setting_on(Setting which) {
  const std::string& value = setting(which);
  return !value.empty() && value != "0";
}

}  // namespace tea
