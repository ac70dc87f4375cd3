// JSON text from values: enough for one object per command.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tea::json {

inline std::string text(std::string_view s) {
  std::string out = "\"";
  for (const char c : s) {
    char escaped[8];
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(c));
      out += escaped;
    } else {
      out += c;
    }
  }
  return out + "\"";
}

// JSON has no infinities: an error beyond every bound is null.
inline std::string number(double x) {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%.9g", x);
  return std::isfinite(x) ? buffer : "null";
}
inline std::string number(uint64_t x) { return std::to_string(x); }
inline std::string boolean(bool x) { return x ? "true" : "false"; }

inline std::string array(const std::vector<std::string>& items) {
  std::string out;
  for (const std::string& item : items) out += (out.empty() ? "" : ", ") + item;
  return "[" + out + "]";
}

using Members = std::vector<std::pair<std::string, std::string>>;
inline std::string object(const Members& members) {
  std::string out;
  for (const auto& [name, value] : members)
    out += (out.empty() ? "" : ", ") + text(name) + ": " + value;
  return "{" + out + "}";
}

}  // namespace tea::json
