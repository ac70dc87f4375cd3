// Moves and updates on the host: every move of a rule, zeros where it says so, and its checks.
#include "buffer.h"
#include "ops/elements.h"
#include "ops/moves.h"

namespace tea {

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

// The device code of a rule, which this rule lacks: it runs on the host only.
template <>
void run_on_gpu(const Odd&, const Place&, bool) {
  ADD_FAILURE();
}

namespace {

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
  EXPECT_EQ(updated<Change::kCopy>(1.0, 2.5, 9.0, whole), 2.5);
  EXPECT_EQ(updated<Change::kAdd>(1.0, 2.25, 9.0, whole), 3.25);
  EXPECT_EQ(updated<Change::kAddProduct>(1.5, 2.25, 3.0, whole), 8.5);
  EXPECT_EQ(updated<Change::kAddProduct>(1.5, 0.0, double{INFINITY}, whole), 1.5);
  EXPECT_EQ(updated<Change::kAddProduct>(1.5, double{NAN}, 0.0, whole), 1.5);
}

TEST(Moves, WeightsOfUpdates) {
  const float lse = 2, step = 1, nothing = -INFINITY;
  EXPECT_EQ((Update{Change::kAdd, 0, 0}.weight<double>()), 1);
  EXPECT_EQ((Update{Change::kAddProduct, 0, &step, &lse}.weight<double>()), std::exp(-1));
  EXPECT_EQ((Update{Change::kAddProduct, 0, &nothing, &lse}.weight<double>()), 0);
}

}  // namespace

}  // namespace tea
