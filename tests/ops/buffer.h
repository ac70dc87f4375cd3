// Common parts of the tests of supporting operations: tensors between redzones, initialised to NaN,
// and the text of an error.
#pragma once
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/problem.h"
#include "math/load_store.h"

namespace tea {

inline constexpr int32_t kEveryDtype[] = {TEA_FP16, TEA_BF16, TEA_FP32,
                                          TEA_FP64, TEA_E4M3, TEA_E5M2};
inline constexpr int32_t kEveryReal[] = {TEA_FP16, TEA_BF16, TEA_FP32, TEA_FP64};

// `count` elements of one dtype. All bytes begin as 0xFF, which is a NaN in every format, and the
// bytes around them must still be what they were when the buffer dies.
class Buffer {
 public:
  Buffer(int32_t dtype, int64_t count)
      : dtype_(dtype),
        count_(count),
        bytes_(static_cast<size_t>(count * dtype_bytes(dtype))),
        memory_(bytes_ + 2 * kZone, 0xA5) {
    std::memset(data(), 0xFF, bytes_);
  }
  Buffer(int32_t dtype, const std::vector<double>& values)
      : Buffer(dtype, static_cast<int64_t>(values.size())) {
    for (int64_t i = 0; i < count_; ++i) set(i, values[static_cast<size_t>(i)]);
  }
  Buffer(Buffer&&) = default;
  ~Buffer() {
    for (size_t i = 0; i < memory_.size(); ++i)
      if ((i < kZone || i >= kZone + bytes_) && memory_[i] != 0xA5) {
        ADD_FAILURE() << "byte " << static_cast<int64_t>(i) - static_cast<int64_t>(kZone)
                      << " of a buffer of " << bytes_ << " was written";
        return;
      }
  }

  void* data() { return memory_.data() + kZone; }
  int32_t dtype() const { return dtype_; }
  int64_t count() const { return count_; }
  size_t bytes() const { return bytes_; }
  double operator[](int64_t i) const { return load_real(memory_.data() + kZone, dtype_, i); }
  void set(int64_t i, double value) { store_real(data(), dtype_, i, value); }
  std::vector<double> values() const {
    std::vector<double> all;
    for (int64_t i = 0; i < count_; ++i) all.push_back((*this)[i]);
    return all;
  }
  // Still as it was made.
  bool untouched(int64_t i) const {
    const size_t size = bytes_ / static_cast<size_t>(count_);
    for (size_t b = 0; b < size; ++b)
      if (memory_[kZone + static_cast<size_t>(i) * size + b] != 0xFF) return false;
    return true;
  }
  bool operator==(const Buffer& other) const { return memory_ == other.memory_; }

 private:
  static constexpr size_t kZone = 64;
  int32_t dtype_;
  int64_t count_;
  size_t bytes_;
  std::vector<unsigned char> memory_;
};

// Normal numbers, rounded to the dtype.
inline Buffer random_buffer(int32_t dtype, int64_t count, std::mt19937_64& random) {
  Buffer buffer(dtype, count);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < count; ++i) buffer.set(i, normal(random));
  return buffer;
}

// Half a unit in the last place of 1: the relative error of one rounding.
inline double rounding_unit(int32_t dtype) {
  Buffer cell(dtype, 1);
  double unit = 1;
  do {
    unit /= 2;
    cell.set(0, 1 + unit);
  } while (cell[0] != 1);
  return unit;
}

// The message of the Error that `body` throws; empty if it throws none.
template <class Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace tea
