// The environment variables of the library in one table: at most four of our own, and those of
// TransformerEngine that it accepts. No other C++ file reads the environment; front ends call
// tea_setting(). docs/environment.md lists the table.
#pragma once
#include <span>
#include <string>
#include <string_view>

namespace tea {

enum class Setting {
  kEngine,
  kLog,
  kThreads,
  kOpenMp,
  kCheck,
  kNondeterministic,
  kFusedAttnBackend
};

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
// The current text of a variable, for those that programs change while they run.
std::string setting_now(Setting which);
// Whether a variable is set, and neither "" nor "0".
bool setting_on(Setting which);

}  // namespace tea
