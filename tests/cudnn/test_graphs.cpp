// The cache of a plan's graphs, with graphs that say when they go.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "cudnn/graphs.h"

namespace tea::cudnn {
namespace {

std::atomic<int> living{0};

struct Counted final : Graph {
  Counted() { ++living; }
  ~Counted() override { --living; }
  uint64_t workspace() const override { return 0; }
  void run(const Pointers&, void*, void*) const override {}
};

GraphKey key_of(int64_t rows) {
  return {{1, rows, rows, 0, 0, 0, 0, 0}, Direction::kForward, false, false};
}
Graphs::Ref made() { return std::make_shared<Counted>(); }

TEST(CudnnGraphs, AreFoundByAllThatTheyWereBuiltFor) {
  Graphs graphs;
  const Graphs::Ref forward = graphs.insert(key_of(64), made());
  EXPECT_EQ(graphs.find(key_of(64)), forward);
  EXPECT_FALSE(graphs.find(key_of(128)));
  GraphKey backward = key_of(64);
  backward.direction = Direction::kBackward;
  EXPECT_FALSE(graphs.find(backward));
  graphs.insert(backward, made());
  backward.dbias = true;
  EXPECT_FALSE(graphs.find(backward));
}

TEST(CudnnGraphs, KeepTheLastUsed) {
  Graphs graphs;
  const auto most = static_cast<int64_t>(Graphs::kMost);
  for (int64_t i = 0; i < most; ++i) graphs.insert(key_of(i), made());
  EXPECT_EQ(living, static_cast<int>(Graphs::kMost));
  EXPECT_TRUE(graphs.find(key_of(0)));
  graphs.insert(key_of(most), made());
  EXPECT_EQ(living, static_cast<int>(Graphs::kMost));
  EXPECT_TRUE(graphs.find(key_of(0)));
  EXPECT_FALSE(graphs.find(key_of(1)));
}

TEST(CudnnGraphs, LiveAsLongAsTheyRun) {
  Graphs graphs;
  const Graphs::Ref runs = graphs.insert(key_of(-1), made());
  for (size_t i = 0; i < Graphs::kMost; ++i) graphs.insert(key_of(static_cast<int64_t>(i)), made());
  EXPECT_FALSE(graphs.find(key_of(-1)));
  EXPECT_EQ(living, static_cast<int>(Graphs::kMost) + 1);
}

// Two threads that met the same sizes at once, and built both: two entries would be one graph less
// for others, and what a captured run found might not be what the next one finds.
TEST(CudnnGraphs, KeepTheFirstOfTwoThatAreTheSame) {
  Graphs graphs;
  const Graphs::Ref first = graphs.insert(key_of(64), made());
  EXPECT_EQ(graphs.insert(key_of(64), made()), first);
  EXPECT_EQ(living, 1);
}

TEST(CudnnGraphs, AreFoundFromManyThreads) {
  Graphs graphs;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&graphs] {
      for (int64_t i = 0; i < 2000; ++i) {
        const GraphKey key = key_of(i * 7 % 80);
        if (!graphs.find(key)) graphs.insert(key, made());
      }
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(living, static_cast<int>(Graphs::kMost));
}

}  // namespace
}  // namespace tea::cudnn
