// Random cases on every engine of the host against the oracle. With a number as argument it runs
// that many from the seed that may follow: test_draw 20000 [first].
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <thread>

#include "kit/check.h"
#include "kit/draw.h"
#include "kit/share.h"

namespace tea::kit {
namespace {

struct Span {
  uint64_t first = 1, count = 2000;
};
Span span;

TEST(Draw, IsReplayedByOneIntegerAndByItsText) {
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    const Case c = draw(seed);
    EXPECT_EQ(c, draw(seed));
    EXPECT_EQ(c, Case::parse(c.text())) << c.text();
    const Case decoding = draw_decoding(seed);
    EXPECT_EQ(decoding, Case::parse(decoding.text())) << decoding.text();
    const Case training = draw_training(seed);
    EXPECT_EQ(training, Case::parse(training.text())) << training.text();
    const Case part = draw_part(seed);
    EXPECT_EQ(part, Case::parse(part.text())) << part.text();
  }
}

TEST(Draw, ReachesEveryValueClassAndEveryField) {
  constexpr int kDraws = 4000;
  std::map<Values, int> classes;
  std::map<std::string_view, int> fields;
  for (uint64_t seed = 0; seed < kDraws; ++seed) {
    const Case c = draw(seed);
    ++classes[c.values];
    const Problem none{};
    for (const Field& f : problem_fields())
      if (f.count == 1 && value_text(c.problem, f) != value_text(none, f)) ++fields[f.name];
  }
  EXPECT_GE(classes.size(), 12u);
  for (const auto& [value, count] : classes)
    EXPECT_GE(count, value == Values::kNanAttended ? kDraws / 40 : kDraws / 20)
        << static_cast<int>(value);
  for (const Field& f : problem_fields()) {
    const bool of_layout = f.name.ends_with("_stride");
    const bool constant = f.name == "struct_size";
    if (f.count == 1 && !of_layout && !constant) {
      EXPECT_GT(fields[f.name], 0) << f.name;
    }
  }
}

// `share`: of the draws, one in so many.
void expect_agreement(Case (*drawn)(uint64_t), uint64_t share = 1) {
  say_share("random cases");
  std::atomic<uint64_t> next{span.first};
  std::mutex mutex;
  std::vector<std::string> failures;
  const auto work = [&] {
    for (uint64_t seed; (seed = next.fetch_add(kEvery)) < span.first + span.count / share;)
      for (const Report& report : check(drawn(seed), host_engines())) {
        if (report.ok()) continue;
        const std::lock_guard lock(mutex);
        failures.push_back("seed " + std::to_string(seed) + "\n" + report.text());
      }
  };
  std::thread other(work);
  work();
  other.join();
  EXPECT_TRUE(failures.empty()) << failures.size() << " of " << span.count / share << " fail";
  for (size_t i = 0; i < std::min<size_t>(failures.size(), 20); ++i) ADD_FAILURE() << failures[i];
}

TEST(Draw, EveryCaseAgreesWithTheOracle) { expect_agreement(draw); }
TEST(Draw, EveryCaseOfDecodingAgreesWithTheOracle) { expect_agreement(draw_decoding, 20); }
TEST(Draw, EveryCaseOfTrainingAgreesWithTheOracle) { expect_agreement(draw_training, 20); }
TEST(Draw, EveryPartAgreesWithTheOracle) { expect_agreement(draw_part); }

}  // namespace
}  // namespace tea::kit

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (argc > 1) tea::kit::span.count = std::strtoull(argv[1], nullptr, 10);
  if (argc > 2) tea::kit::span.first = std::strtoull(argv[2], nullptr, 10);
  return RUN_ALL_TESTS();
}
