// Memory that threads keep between calls.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace tea::cpu {

constexpr int64_t kPackedBytes = 16 << 20;  // of packed heads at a time, if there are several

template <class Real>
class Buffer {
 public:
  explicit Buffer(int64_t n)
      : data_(static_cast<Real*>(::operator new(static_cast<size_t>(n) * sizeof(Real), kLine))),
        size_(n) {}
  ~Buffer() { ::operator delete(data_, kLine); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Real* get() const { return data_; }
  int64_t size() const { return size_; }

 private:
  static constexpr std::align_val_t kLine{64};
  Real* data_;
  int64_t size_;
};

// Memory from a cache of this thread, to which it returns. One object has it at a time: a caller's
// parallel_for may run another call on this thread before this one ends, which then gets memory of
// its own. New memory costs a page fault for every 4 KiB, which decoding would notice.
template <class Real>
class Kept {
 public:
  explicit Kept(int64_t n) {
    if (n == 0) return;
    auto& all = idle();
    auto fits = std::find_if(all.begin(), all.end(), [&](const auto& b) { return b->size() >= n; });
    if (fits == all.end()) {
      buffer_ = std::make_unique<Buffer<Real>>(n);
      if (all.size() == kMost) all.erase(all.begin());  // the smallest
    } else {
      buffer_ = std::move(*fits);
      all.erase(fits);
    }
  }
  // Memory larger than that of several packed heads is returned to the system.
  ~Kept() {
    auto& all = idle();
    if (!buffer_ || buffer_->size() * int64_t{sizeof(Real)} > kPackedBytes || all.size() >= kMost)
      return;
    all.insert(std::find_if(all.begin(), all.end(),
                            [&](const auto& b) { return b->size() >= buffer_->size(); }),
               std::move(buffer_));
  }
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  Real* get() const { return buffer_ ? buffer_->get() : nullptr; }

 private:
  static constexpr size_t kMost = 3;  // as many as a call has in hand at a time
  using Buffers = std::vector<std::unique_ptr<Buffer<Real>>>;
  static Buffers& idle() {  // by size
    thread_local Buffers buffers = [] {
      Buffers none;
      none.reserve(kMost);  // so that ~Kept does not allocate
      return none;
    }();
    return buffers;
  }
  std::unique_ptr<Buffer<Real>> buffer_;
};

}  // namespace tea::cpu
