// What is done once for each device, from any thread.
#pragma once
#include <atomic>
#include <cstdint>

namespace tea::portable {

class OncePerDevice {
 public:
  // Calls `action` unless it has run for this device. It may run again: threads can be first
  // together, and devices from number 64 on are not remembered.
  template <class Action>
  void run(int device, Action&& action) {
    const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
    if (done_.load(std::memory_order_acquire) & bit) return;
    action();
    done_.fetch_or(bit, std::memory_order_release);
  }

 private:
  std::atomic<uint64_t> done_{0};
};

}  // namespace tea::portable
