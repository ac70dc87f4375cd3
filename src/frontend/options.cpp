#include "frontend/options.h"

namespace tea::frontend {
namespace {

namespace schema_type {
// NOLINTBEGIN(readability-identifier-naming): the names are the kinds of options.def.
constexpr const char *Tensor = "Tensor", *OptionalTensor = "Tensor?", *Text = "str", *Flag = "bool",
                     *Integer = "SymInt", *Number = "float", *OptionalNumber = "float?";
// NOLINTEND(readability-identifier-naming)
}  // namespace schema_type

}  // namespace

const std::string& schema() {
  static const std::string text = [] {
    std::string out;
    const auto add = [&](const char* type, const char* name, const std::string& usual) {
      if (!out.empty()) out += ", ";
      out += std::string(type) + " " + name + (usual.empty() ? "" : "=" + usual);
    };
#define TEA_OPTION(kind, name, default_text) add(schema_type::kind, #name, default_text);
#include "frontend/options.def"
    return out;
  }();
  return text;
}

}  // namespace tea::frontend
