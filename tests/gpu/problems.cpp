// Every line of tests/problems/*.txt on the GPU against the oracle: between redzones, and next to
// unmapped memory on either side; by the engine that the library chooses and by each that is named.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <mutex>

#include "gpu/parallel.h"
#include "kit/check.h"

namespace tea::kit {
namespace {

constexpr int kGpu = 0;

struct Work {
  std::string where;
  Case test;
};

std::vector<Work> all_lines() {
  std::vector<Work> out;
  for (const auto& file :
       std::filesystem::directory_iterator(TE_ATTENTION_SOURCE_DIR "/tests/problems"))
    if (file.path().extension() == ".txt")
      for (const Line& line : read_lines(file.path()))
        out.push_back({file.path().filename().string() + ":" + std::to_string(line.number),
                       Case::parse(line.text)});
  return out;
}

// The problems that ran, by engine, and those that were refused. A refusal by an engine that was
// named is its right; the library may refuse what no GPU runs.
struct Tally {
  std::map<std::string, int> ran, refused;
  int failed = 0;
};

Tally run_all(const std::string& engine, Around around, int shared_bytes = 0) {
  const std::vector<Work> lines = all_lines();
  EXPECT_GE(lines.size(), 600u);
  Tally tally;
  std::mutex mutex;
  std::atomic<bool> lost{false};
  parallel_for(lines.size(), [&](size_t i) {
    if (lost) return;
    const Report report = check(lines[i].test, engine,
                                {.device = kGpu, .around = around, .shared_bytes = shared_bytes});
    if (report.lost) lost = true;
    const std::lock_guard lock(mutex);
    const bool may_refuse = !engine.empty() || !runs_on_gpus(lines[i].test.problem);
    if (report.refused && may_refuse) {
      ++tally.refused[engine.empty() ? "the library" : engine];
      return;
    }
    ++tally.ran[report.engine];
    if (!report.ok() && ++tally.failed <= 20)
      ADD_FAILURE() << lines[i].where << "\n" << report.text();
  });
  EXPECT_EQ(tally.failed, 0);
  for (const auto& [name, count] : tally.ran)
    std::printf("  %s ran %d lines\n", name.c_str(), count);
  for (const auto& [name, count] : tally.refused)
    std::printf("  %s refused %d lines\n", name.c_str(), count);
  return tally;
}

TEST(Problems, AgreeWithTheOracle) { EXPECT_FALSE(run_all("", Around::kRedzones).ran.empty()); }

TEST(Problems, AgreeOnEveryEngineByName) {
  for (const std::string& engine : engines_of(kGpu))
    EXPECT_FALSE(run_all(engine, Around::kRedzones).ran.empty()) << engine;
}

// As much as GPUs of sm_86 and sm_89 have.
TEST(Problems, AgreeInLittleSharedMemory) {
  EXPECT_FALSE(run_all("portable", Around::kRedzones, 99 << 10).ran.empty());
}

TEST(Problems, StayInsideWhereTheMemoryBehindIsUnmapped) { run_all("", Around::kUnmappedBehind); }
TEST(Problems, StayInsideWhereTheMemoryBeforeIsUnmapped) { run_all("", Around::kUnmappedBefore); }

}  // namespace
}  // namespace tea::kit
