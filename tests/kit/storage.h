// Memory with a pattern on both sides that no engine may touch: kRedzone bytes at least.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

namespace tea::kit {

inline constexpr size_t kRedzone = 4096;

class Storage {
 public:
  Storage() = default;
  // The data begins on a multiple of `alignment`, but on none of twice as much.
  Storage(size_t bytes, size_t alignment) : alignment_(alignment), bytes_(bytes) {
    whole_.resize(bytes + 2 * kRedzone + 2 * alignment, kPattern);
    const size_t start = reinterpret_cast<uintptr_t>(whole_.data()) + kRedzone;
    const size_t up = (start + 2 * alignment - 1) / (2 * alignment) * (2 * alignment);
    begin_ = up - reinterpret_cast<uintptr_t>(whole_.data());
    if (up - start >= alignment)
      begin_ -= alignment;
    else
      begin_ += alignment;
  }
  uint8_t* data() { return whole_.data() + begin_; }
  const uint8_t* data() const { return whole_.data() + begin_; }
  size_t size() const { return bytes_; }
  size_t alignment() const { return alignment_; }
  // Of data that was never written.
  bool holds_pattern() const { return is_pattern(data(), bytes_); }
  // Where the first byte outside the data that has changed lies, from the data's start.
  std::optional<int64_t> damage() const {
    const size_t end = begin_ + bytes_;
    if (is_pattern(whole_.data(), begin_) && is_pattern(whole_.data() + end, whole_.size() - end))
      return std::nullopt;
    size_t i = 0;
    while (whole_[i] == kPattern) i = i + 1 == begin_ ? end : i + 1;
    return static_cast<int64_t>(i) - static_cast<int64_t>(begin_);
  }

 private:
  static constexpr uint8_t kPattern = 0xA7;
  // Each byte is like the one before it.
  static bool is_pattern(const uint8_t* p, size_t n) {
    return n == 0 || (*p == kPattern && std::memcmp(p, p + 1, n - 1) == 0);
  }
  std::vector<uint8_t> whole_;
  size_t alignment_ = 1, begin_ = 0, bytes_ = 0;
};

}  // namespace tea::kit
