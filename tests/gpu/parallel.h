// Independent pieces of work on all cores, so that one GPU and the oracle on the host are busy.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace tea::kit {

template <class Body>
void parallel_for(size_t count, const Body& body) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i; (i = next++) < count;) body(i);
  };
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < std::max(std::thread::hardware_concurrency(), 1u); ++i)
    threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace tea::kit
