// A loop over all cores.
#pragma once
#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

namespace gpt {

// Calls f(0) .. f(n - 1), each once, and returns when all are done. Throws the first exception.
template <class F>
void parallel(int n, const F& f) {
  std::atomic<int> next = 0;
  std::atomic_flag failed;
  std::exception_ptr error;
  const auto work = [&] {
    for (int i; (i = next++) < n;) {
      try {
        f(i);
      } catch (...) {
        if (!failed.test_and_set()) error = std::current_exception();
        next = n;
      }
    }
  };
  {
    std::vector<std::jthread> threads;
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    for (int i = 1; i < std::min(n, cores); ++i) threads.emplace_back(work);
    work();
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace gpt
