// parallel_for and thread_count.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
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

TEST(Pool, CallersFromManyThreadsDoNotMix) {
  std::atomic<int> sum{0};
  std::vector<std::thread> callers;
  for (int t = 0; t < 6; ++t)
    callers.emplace_back([&] {
      for (int i = 0; i < 50; ++i) parallel_for(5, [&](int64_t) { ++sum; });
    });
  for (std::thread& t : callers) t.join();
  EXPECT_EQ(sum, 6 * 50 * 5);
}

TEST(Pool, ACallWhileAnotherHasTheThreadsDoesNotWait) {
  std::atomic<bool> holds{false}, release{false};
  std::thread holder([&] {
    parallel_for(2, [&](int64_t) {
      holds = true;
      while (!release) std::this_thread::yield();
    });
  });
  while (!holds) std::this_thread::yield();
  const auto id = std::this_thread::get_id();
  int ran = 0;
  parallel_for(5, [&](int64_t) { ran += std::this_thread::get_id() == id; });  // or never returns
  EXPECT_EQ(ran, 5);
  release = true;
  holder.join();
}

// The threads of the parent do not exist in a forked child.
TEST(Pool, AForkedChildComputesAndExits) {
  parallel_for(8, [](int64_t) {});
  const pid_t child = fork();
  if (child == 0) {
    std::atomic<int> sum{0};
    parallel_for(100, [&](int64_t) { ++sum; });
    std::exit(sum == 100 ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

void serially(void*, int64_t count, void (*body)(void*, int64_t), void* argument) {
  for (int64_t i = 0; i < count; ++i) body(argument, i);
}

TEST(Pool, RunsOnTheThreadsOfTheCaller) {
  const auto id = std::this_thread::get_id();
  int sum = 0;
  parallel_for(100,
               [&](int64_t i) {
                 EXPECT_EQ(std::this_thread::get_id(), id);
                 sum += static_cast<int>(i);
               },
               {serially, nullptr});
  EXPECT_EQ(sum, 4950);
}

TEST(Pool, AnExceptionDoesNotPassThroughTheCallersThreads) {
  int finished = 0;
  EXPECT_THROW(parallel_for(10,
                            [&](int64_t i) {
                              if (i == 3) throw std::runtime_error("three");
                              ++finished;
                            },
                            {serially, nullptr}),
               std::runtime_error);
  EXPECT_EQ(finished, 9);
}

// `context` points to the items that an incorrect parallel_for runs.
std::string complaint(std::vector<int64_t> items) {
  const auto run = [](void* context, int64_t, void (*body)(void*, int64_t), void* argument) {
    for (const int64_t i : *static_cast<std::vector<int64_t>*>(context)) body(argument, i);
  };
  std::array<int, 3> ran{};
  try {
    parallel_for(3, [&](int64_t i) { ++ran.at(static_cast<size_t>(i)); }, {run, &items});
  } catch (const Error& e) {
    for (const int n : ran) EXPECT_LE(n, 1);
    return e.what();
  }
  return "";
}

TEST(Pool, EveryItemMustRunOnce) {
  EXPECT_EQ(complaint({2, 0, 1}), "");
  EXPECT_EQ(complaint({0, 2}),
            "run.parallel_for ran 2 of 3 items, and 0 that were not its to run; needs each once");
  EXPECT_EQ(complaint({0, 1, 1, 2}),
            "run.parallel_for ran 3 of 3 items, and 1 that were not its to run; needs each once");
  EXPECT_EQ(complaint({-1, 0, 1, 2, 3}),
            "run.parallel_for ran 3 of 3 items, and 2 that were not its to run; needs each once");
}

TEST(Pool, ABoundOfOneIsTheCallersThread) {
  const auto id = std::this_thread::get_id();
  std::atomic<int> sum{0};
  parallel_for(100,
               [&](int64_t) {
                 EXPECT_EQ(std::this_thread::get_id(), id);
                 ++sum;
               },
               {.most = 1});
  EXPECT_EQ(sum, 100);
  EXPECT_EQ(thread_count(1), 1);
  EXPECT_EQ(thread_count(1 << 20), thread_count());
}

TEST(Pool, ABoundHoldsWhereThePoolHasMoreThreads) {
  std::atomic<int> inside{0}, most{0};
  parallel_for(64,
               [&](int64_t) {
                 const int now = ++inside;
                 for (int seen = most; now > seen && !most.compare_exchange_weak(seen, now);) {
                 }
                 std::this_thread::yield();
                 --inside;
               },
               {.most = 2});
  EXPECT_LE(most, 2);
}

TEST(Pool, HasAtLeastTheCallersThread) { EXPECT_GE(thread_count(), 1); }

}  // namespace
}  // namespace tea::cpu
