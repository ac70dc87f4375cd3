// tea_parallel_for on XLA's thread pool, so that attention uses the threads that JAX already has.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "jax/ffi.h"

namespace tea::jax {

// One call of tea_parallel_for. The caller works too and waits only for helpers that have begun: a
// helper that a busy pool starts later finds the job closed. So a full pool cannot cause a
// deadlock.
class Job {
 public:
  Job(int64_t count, void (*body)(void*, int64_t), void* argument)
      : count_(count), body_(body), argument_(argument) {}

  void work() {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;)
      body_(argument_, i);
  }
  void help() {
    {
      const std::lock_guard lock(mutex_);
      if (closed_) return;
      ++active_;
    }
    work();
    const std::lock_guard lock(mutex_);
    if (--active_ == 0) idle_.notify_one();
  }
  void close() {
    std::unique_lock lock(mutex_);
    closed_ = true;
    idle_.wait(lock, [&] { return active_ == 0; });
  }

 private:
  const int64_t count_;
  void (*const body_)(void*, int64_t);
  void* const argument_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable idle_;
  int active_ = 0;
  bool closed_ = false;
};

// `context` is an ffi::ThreadPool.
inline void parallel_for(void* context, int64_t count, void (*body)(void*, int64_t),
                         void* argument) {
  auto& pool = *static_cast<ffi::ThreadPool*>(context);
  const int64_t helpers = std::min(count, pool.num_threads()) - 1;
  if (helpers < 1) {
    for (int64_t i = 0; i < count; ++i) body(argument, i);
    return;
  }
  const auto job = std::make_shared<Job>(count, body, argument);
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([job] { job->help(); });
  job->work();
  job->close();
}

}  // namespace tea::jax
