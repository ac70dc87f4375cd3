// Moves and updates on the host: every move of a rule, zeros where it says so, and its checks.
#include "buffer.h"
#include "ops/elements.h"
#include "ops/moves.h"

namespace tea {
namespace {

// Odd places get the bytes of the place before; every fourth becomes zero.
struct Odd : Moves {
  char* data;
  int32_t* checked;
  void check(int64_t i) const { *checked += 1 << i; }
  Move at(int64_t i) const {
    if (i % 2 == 0) return {};
    return {data + i * bytes, i % 4 == 1 ? data + (i - 1) * bytes : nullptr};
  }
};

TEST(Moves, AreMadeAsTheRuleSays) {
  char data[] = "abcdefghijklmnop";
  int32_t checked = 0;
  Odd rule{};
  rule.moves = 4, rule.bytes = 4, rule.checks = 3;
  rule.data = data, rule.checked = &checked;
  run(rule, {});
  EXPECT_EQ(std::string(data, 16), std::string("abcdabcdijkl\0\0\0\0", 16));
  EXPECT_EQ(checked, 7);
}

TEST(Moves, UpdatesRoundAsTheyAreAskedTo) {
  const auto whole = [](double x) { return std::round(x); };
  EXPECT_EQ((Update<double>{Change::kCopy, 0, 0, 9}(1, 2.5, whole)), 2.5);
  EXPECT_EQ((Update<double>{Change::kAdd, 0, 0, 9}(1, 2.25, whole)), 3.25);
  EXPECT_EQ((Update<double>{Change::kAddProduct, 0, 0, 3}(1.5, 2.25, whole)), 8.5);
  EXPECT_EQ((Update<double>{Change::kAddProduct, 0, 0, INFINITY}(1.5, 0, whole)), 1.5);
}

}  // namespace
}  // namespace tea
