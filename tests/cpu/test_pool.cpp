// parallel_for and thread_count.
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "cpu/pool.h"

namespace tea::cpu {
namespace {

TEST(Pool, RunsEveryItemOnce) {
  for (const int64_t n : {0, 1, 2, 7, 1000}) {
    std::vector<std::atomic<int>> ran(static_cast<size_t>(n));
    parallel_for(n, [&](int64_t i) { ++ran[static_cast<size_t>(i)]; });
    for (const auto& count : ran) EXPECT_EQ(count, 1);
  }
}

TEST(Pool, NestedCallsRunOnTheirThread) {
  std::atomic<int> sum{0};
  parallel_for(8, [&](int64_t) {
    const auto id = std::this_thread::get_id();
    parallel_for(8, [&](int64_t) {
      EXPECT_EQ(std::this_thread::get_id(), id);
      ++sum;
    });
  });
  EXPECT_EQ(sum, 64);
}

TEST(Pool, AnExceptionArrivesAfterTheOthersFinished) {
  std::atomic<int> finished{0};
  EXPECT_THROW(parallel_for(100,
                            [&](int64_t i) {
                              if (i == 3) throw std::runtime_error("three");
                              ++finished;
                            }),
               std::runtime_error);
  EXPECT_EQ(finished, 99);
  parallel_for(10, [&](int64_t) { ++finished; });  // and the pool still works
  EXPECT_EQ(finished, 109);
}

TEST(Pool, CallersFromManyThreadsTakeTurns) {
  std::atomic<int> sum{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 6; ++t)
    callers.emplace_back([&] {
      for (int i = 0; i < 50; ++i) parallel_for(5, [&](int64_t) { ++sum; });
    });
  for (std::thread& t : callers) t.join();
  EXPECT_EQ(sum, 6 * 50 * 5);
}

TEST(Pool, HasAtLeastTheCallersThread) { EXPECT_GE(thread_count(), 1); }

}  // namespace
}  // namespace tea::cpu
