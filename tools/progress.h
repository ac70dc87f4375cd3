// How far a long command has come, on standard error: on a terminal one line that is rewritten, in
// a log a line every half minute.
#pragma once
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <mutex>

namespace tea::tool {

class Progress {
 public:
  explicit Progress(uint64_t total) : total_(total) {}
  ~Progress() {
    if (shown_ && terminal_) std::fprintf(stderr, "\r\033[K");
  }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // From any thread.
  void at(uint64_t done, uint64_t failed, uint64_t refused) {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    if (now < next_) return;
    next_ = now + (terminal_ ? std::chrono::milliseconds(500) : std::chrono::seconds(10));
    const double seconds = std::chrono::duration<double>(now - begin_).count();
    const double rate = static_cast<double>(done) / seconds;
    const double left = rate > 0 ? static_cast<double>(total_ - done) / rate : 0;
    std::fprintf(stderr,
                 "%s%llu of %llu cases, %llu failed, %llu refused, %.0f a second, %.0f s left%s",
                 terminal_ ? "\r\033[K" : "", static_cast<unsigned long long>(done),
                 static_cast<unsigned long long>(total_), static_cast<unsigned long long>(failed),
                 static_cast<unsigned long long>(refused), rate, left, terminal_ ? "" : "\n");
    std::fflush(stderr);
    shown_ = true;
  }

 private:
  using Clock = std::chrono::steady_clock;
  const uint64_t total_;
  const bool terminal_ = isatty(STDERR_FILENO) == 1;
  const Clock::time_point begin_ = Clock::now();
  Clock::time_point next_ = begin_ + std::chrono::seconds(1);
  bool shown_ = false;
  std::mutex mutex_;
};

}  // namespace tea::tool
