// The automatic refusal of fields and values that an engine does not list.
#include "core/engine.h"

#include <algorithm>
#include <cstring>

namespace tea {
namespace {

constexpr std::string_view kSizes[] = {"batch",  "heads_q", "heads_kv",  "seqlen_q", "seqlen_kv",
                                       "dim_qk", "dim_v",   "page_size", "alignment"};
// The names of all other strides end with "_stride".
constexpr std::string_view kStrides[] = {"q", "k", "v", "o", "dout", "dq", "dk", "dv", "lse"};

const Known* find(std::span<const Known> knows, std::string_view name) {
  for (const Known& known : knows)
    if (known.field == name) return &known;
  return nullptr;
}

// The bits a field uses: its set bits, or one bit for its enum value; 1 for anything else set.
uint32_t used_values(const Problem& p, const Field& f) {
  const char* at = reinterpret_cast<const char*>(&p) + f.offset;
  uint32_t word;
  std::memcpy(&word, at, sizeof word);
  if (f.kind == Kind::kEnum) return word ? uint32_t{1} << word : 0;
  if (f.kind == Kind::kBits) return word;
  for (size_t i = 0; i < f.bytes(); ++i)
    if (at[i]) return 1;
  return 0;
}

std::string known_names(const Field& f, uint32_t values) {
  std::string out;
  for (size_t i = 0; i < f.names.size(); ++i)
    if (values >> i & 1) out += (out.empty() ? "" : ", ") + std::string(f.names[i]);
  return out;
}

}  // namespace

bool is_geometry(std::string_view field) {
  return std::ranges::count(kSizes, field) || std::ranges::count(kStrides, field) ||
         field.ends_with("_stride");
}

Attempt Engine::attempt(const Problem& problem, const Device& device) const {
  for (const Field& f : problem_fields()) {
    if (f.kind == Kind::kSize || is_geometry(f.name)) continue;
    const uint32_t used = used_values(problem, f);
    if (!used) continue;
    const Known* known = find(known_fields(), f.name);
    const std::string seen = std::string(f.name) + " is " + value_text(problem, f);
    if (!known) return Refusal{seen + "; it does not know this field"};
    const bool has_values = f.kind == Kind::kEnum || f.kind == Kind::kBits;
    if (has_values && (used & ~known->values))
      return Refusal{seen + "; needs " + known_names(f, known->values)};
  }
  return plan(problem, device);
}

}  // namespace tea
