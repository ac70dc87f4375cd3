// Actions that are needed once for each device, from any thread.
#pragma once
#include <atomic>
#include <cstdint>

namespace tea {

class OncePerDevice {
 public:
  // False until mark(), and always for devices from number 64 on. Threads may race: the action must
  // be repeatable.
  bool done(int device) const { return done_.load(std::memory_order_acquire) & bit(device); }
  void mark(int device) { done_.fetch_or(bit(device), std::memory_order_release); }

  // Calls `action` unless done, and marks it as done if it does not throw.
  template <class Action>
  void run(int device, Action&& action) {
    if (done(device)) return;
    action();
    mark(device);
  }

 private:
  static uint64_t bit(int device) { return device < 64 ? uint64_t{1} << device : 0; }

  std::atomic<uint64_t> done_{0};
};

}  // namespace tea
