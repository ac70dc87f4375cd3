// Engine::attempt: for every field of the table except sizes and strides, a problem that uses it is
// refused by an engine that does not list it, and every value of an enum by one that does not list
// the value.
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <vector>

#include "core/engine.h"
#include "core/registry.h"
#include "cpu/reference.h"

namespace tea {
namespace {

Attempt accept(const Problem&, const Device&) { return Refusal{"reached plan()"}; }

std::string outcome(const std::vector<Known>& known, const Problem& p) {
  static std::span<const Known> fields;
  fields = known;
  const Engine engine{"test", [] { return fields; }, accept};
  return std::get<Refusal>(engine.attempt(p, Device{})).why;
}

// The field set to `value` (an enum value, a bit, or any nonzero number).
Problem with(const Field& f, int32_t value) {
  Problem p{};
  char* at = reinterpret_cast<char*>(&p) + f.offset;
  const int64_t wide = value;
  const double real = value;
  if (f.kind == Kind::kInt64)
    std::memcpy(at + 8 * (f.count - 1), &wide, 8);
  else if (f.kind == Kind::kReal)
    std::memcpy(at, &real, 8);
  else
    std::memcpy(at, &value, 4);
  return p;
}

TEST(Engine, EveryFieldIsRefusedUnlessListed) {
  for (const Field& f : problem_fields()) {
    if (f.kind == Kind::kSize || is_geometry(f.name)) continue;
    EXPECT_NE(outcome({}, with(f, 1)).find(std::string(f.name) + " is "), std::string::npos);
    EXPECT_EQ(outcome({{f.name}}, with(f, 1)), "reached plan()") << f.name;
  }
}

TEST(Engine, SizesAndStridesNeedNoListing) {
  int seen = 0;
  for (const Field& f : problem_fields()) {
    if (!is_geometry(f.name)) continue;
    EXPECT_EQ(outcome({}, with(f, 1)), "reached plan()") << f.name;
    EXPECT_TRUE(f.names.empty() && f.kind != Kind::kReal) << f.name << " is an option";
    ++seen;
  }
  EXPECT_EQ(seen, 23);
}

TEST(Engine, EveryValueIsRefusedUnlessListed) {
  for (const Field& f : problem_fields()) {
    if (f.kind != Kind::kEnum && f.kind != Kind::kBits) continue;
    const bool bits = f.kind == Kind::kBits;
    for (int v = bits ? 0 : 1; v < static_cast<int>(f.names.size()); ++v) {
      const Problem p = with(f, bits ? 1 << v : v);
      EXPECT_EQ(outcome({{f.name, 1u << v}}, p), "reached plan()");
      EXPECT_NE(outcome({{f.name, ~(1u << v)}}, p).find("; needs "), std::string::npos)
          << f.name << " " << v;
    }
  }
}

TEST(Engine, TheReferenceKnowsEveryFieldAndValue) {
  for (const Field& f : problem_fields()) {
    if (f.kind == Kind::kSize) continue;
    const bool named = !f.names.empty();
    for (int v = 0; v < (named ? static_cast<int>(f.names.size()) : 1); ++v) {
      const Problem p = with(f, !named ? 1 : f.kind == Kind::kBits ? 1 << v : v);
      // q_form = paged is a value of the shared enum, but not a valid one for queries.
      const bool expected = !(f.name == "q_form" && v == TEA_PAGED);
      EXPECT_EQ(
          std::holds_alternative<std::unique_ptr<Executable>>(cpu::kReference.attempt(p, Device{})),
          expected)
          << f.name << " " << v;
    }
  }
}

// A misspelt or removed field in an engine's list would otherwise refuse every problem that uses
// it.
TEST(Engine, EveryEngineListsOptionsThatExist) {
  std::set<std::string_view> names;
  for (const Field& f : problem_fields())
    if (!is_geometry(f.name)) names.insert(f.name);
  for (const Engine& engine : engines())
    for (const Known& known : engine.known_fields())
      EXPECT_TRUE(names.contains(known.field)) << engine.name << ": " << known.field;
}

}  // namespace
}  // namespace tea
