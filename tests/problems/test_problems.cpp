// Every line of tests/problems/*.txt on every engine of the host against the oracle, forward and
// backward. A line is a promise: none is skipped, but under a sanitizer most are.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "kit/check.h"
#include "kit/share.h"

namespace {

std::vector<std::filesystem::path> problem_files() {
  std::vector<std::filesystem::path> out;
  for (const auto& entry :
       std::filesystem::directory_iterator(TE_ATTENTION_SOURCE_DIR "/tests/problems"))
    if (entry.path().extension() == ".txt") out.push_back(entry.path());
  std::sort(out.begin(), out.end());
  return out;
}

class ProblemFile : public testing::TestWithParam<std::filesystem::path> {};

TEST_P(ProblemFile, EveryLineAgreesWithTheOracle) {
  tea::kit::say_share("lines");
  int number = 0;
  for (const tea::kit::Line& line : tea::kit::read_lines(GetParam())) {
    if (number++ % tea::kit::kEvery) continue;
    SCOPED_TRACE(GetParam().filename().string() + ":" + std::to_string(line.number));
    const tea::kit::Case c = tea::kit::Case::parse(line.text);
    EXPECT_EQ(tea::kit::Case::parse(c.text()), c);
    for (const tea::kit::Report& report : tea::kit::check(c, tea::kit::host_engines())) {
      EXPECT_TRUE(report.ok()) << report.text();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, ProblemFile, testing::ValuesIn(problem_files()),
                         [](const auto& test) { return test.param.stem().string(); });

TEST(ProblemFiles, AreManyAndWithoutRepetition) {
  std::vector<std::string> all;
  for (const auto& path : problem_files())
    for (const tea::kit::Line& line : tea::kit::read_lines(path))
      all.push_back(tea::kit::Case::parse(line.text).text());
  RecordProperty("lines", static_cast<int>(all.size()));
  EXPECT_GE(all.size(), 600u);
  std::sort(all.begin(), all.end());
  const auto twice = std::adjacent_find(all.begin(), all.end());
  EXPECT_EQ(twice, all.end()) << "twice: " << *twice;
}

}  // namespace
