// What is done once for each device, from any thread.
#pragma once
#include <atomic>
#include <cstdint>

namespace tea {

class OncePerDevice {
 public:
  // False where it has never been done, and for devices from number 64 on, which are not
  // remembered. Threads can be first together: what is done may be done again.
  bool done(int device) const { return done_.load(std::memory_order_acquire) & bit(device); }
  void mark(int device) { done_.fetch_or(bit(device), std::memory_order_release); }

  // Unless done, calls `action` and, if it returns, remembers that.
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
