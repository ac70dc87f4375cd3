// The only place that reads the environment. Our own variables and TransformerEngine's aliases are
// rows of one table.
#pragma once
#include <span>
#include <string>
#include <string_view>

namespace tea {

enum class Setting { kEngine, kDeterministic, kThreads, kLog };

struct SettingRow {
  Setting setting;
  const char* variable;
  const char* alias;  // TransformerEngine's name, or NULL
  std::string_view meaning;
};
std::span<const SettingRow> settings();

// The text of a variable, read once per process; empty if unset.
const std::string& setting(Setting which);

}  // namespace tea
