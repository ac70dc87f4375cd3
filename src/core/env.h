// The only place of the library that reads the environment. Our own variables and
// TransformerEngine's aliases are rows of one table. (TE_ATTENTION_CHECK is of the PyTorch
// operators, which know the public API alone.)
#pragma once
#include <span>
#include <string>
#include <string_view>

namespace tea {

enum class Setting { kEngine, kDeterministic, kLog, kThreads, kOpenMp, kFusedAttnBackend };

struct SettingRow {
  Setting setting;
  const char* variable;
  const char* alias;        // TransformerEngine's name, or NULL
  const char* alias_means;  // the alias counts only with this value, which then reads as "1"
  std::string_view meaning;
};
std::span<const SettingRow> settings();

// The text of a variable or of its alias, read once per process; empty if unset.
const std::string& setting(Setting which);
// The same, read now: for what callers change while they run.
std::string setting_now(Setting which);
// Set, and neither "" nor "0".
bool setting_on(Setting which);

}  // namespace tea
