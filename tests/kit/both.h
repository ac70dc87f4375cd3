// One description of a case, run on the host and on a GPU: the same numbers, the same places, and
// afterwards the same results, with redzones around every tensor.
#pragma once
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/problem.h"
#include "kit/gpu.h"
#include "math/load_store.h"
#include "te_attention_ops.h"

namespace tea::kit {

// How close a result of the GPU is to the host's: both have rounded `roundings` times to the
// tensor's type, at the magnitude of the result plus `magnitude`. 0: the same number.
struct Close {
  double roundings = 0, magnitude = 0;
};

inline bool close_enough(int32_t dtype, const Close& close, double x, double y) {
  constexpr double kUnits[] = {0, 0x1p-11, 0x1p-8, 0x1p-24, 0x1p-53, 0x1p-4, 0x1p-3};
  if (x == y || (std::isnan(x) && std::isnan(y))) return true;
  if (std::isinf(x) || std::isinf(y)) return false;  // no bound follows from an infinite number
  // Below fp16's and fp8's normal numbers a rounding is no longer relative.
  const double smallest = dtype == TEA_FP16 || dtype >= TEA_E4M3 ? 0x1p-14 : 1e-37;
  const double least = close.roundings ? smallest : 0;
  const double bound = close.roundings * kUnits[dtype] * (std::fabs(x) + close.magnitude + least);
  return std::fabs(x - y) <= bound;
}

class Side {
 public:
  static constexpr size_t kBytes = size_t{32} << 20;

  // `gpu`: NULL for the host. `captured`: what runs there is captured first, and then replayed.
  Side(Gpu* gpu, uint64_t seed, bool captured = false)
      : random(seed), gpu_(gpu), captured_(captured), shift_(seed % 3 ? 0 : seed / 3 % 16) {
    if (gpu_) {
      const Gpu::Block block = gpu_->block(kBytes);
      host_ = block.host, device_ = block.device;
    } else {
      memory_.reset(new uint8_t[kBytes]);  // not filled: most cases need little of it
      host_ = memory_.get();
    }
  }

  std::mt19937_64 random;  // of what the case is made
  int64_t pick(int64_t least, int64_t most) {
    return least + static_cast<int64_t>(random() % static_cast<uint64_t>(most - least + 1));
  }
  bool chance(int percent) { return pick(1, 100) <= percent; }
  template <class T>
  T one_of(std::initializer_list<T> list) {
    return list.begin()[pick(0, static_cast<int64_t>(list.size()) - 1)];
  }

  int device() const { return gpu_ ? 0 : -1; }
  void* stream() const { return gpu_ ? gpu_->stream() : nullptr; }

  // ---- Tensors: the addresses are those of the side

  // All bits set, which is NaN.
  void* fresh(int32_t dtype, int64_t count, Close close = {}) {
    return place(dtype, count, close,
                 [](uint8_t* at, size_t bytes) { std::memset(at, 0xFF, bytes); });
  }
  // Normal numbers; some others with `hostile`.
  void* normal(int32_t dtype, int64_t count, Close close = {}, bool hostile = false) {
    return place(dtype, count, close, [&](uint8_t* at, size_t) {
      std::normal_distribution<double> draw;
      for (int64_t i = 0; i < count; ++i) store_real(at, dtype, i, draw(random));
      for (int64_t i = 0; hostile && i < count; i += pick(1, 40))
        store_real(at, dtype, i,
                   one_of<double>({NAN, -NAN, INFINITY, -INFINITY, 0.0, -0.0, 1e30, 1e-30}));
    });
  }
  void* bytes(const std::vector<uint8_t>& all, int32_t dtype = TEA_E4M3, Close close = {}) {
    const auto count = static_cast<int64_t>(all.size()) / dtype_bytes(dtype);
    return place(dtype, count, close,
                 [&](uint8_t* at, size_t size) { std::memcpy(at, all.data(), size); });
  }
  template <class T>
  T* numbers(const std::vector<T>& all) {
    std::vector<uint8_t> raw(all.size() * sizeof(T));
    if (!raw.empty()) std::memcpy(raw.data(), all.data(), raw.size());
    return reinterpret_cast<T*>(
        allocate(0, static_cast<int64_t>(raw.size()), sizeof(T), {},
                 [&](uint8_t* at, size_t n) { std::memcpy(at, raw.data(), n); }));
  }
  float* scalar(float value, Close close = {}) {
    return static_cast<float*>(
        place(TEA_FP32, 1, close, [&](uint8_t* at, size_t) { std::memcpy(at, &value, 4); }));
  }
  // Memory for intermediate results, which only a GPU has: they are not compared.
  float* scratch(size_t count) {
    float* const out = numbers(std::vector<float>(count, NAN));
    tensors_.back().compare = false;
    return out;
  }
  int32_t* status() {
    int32_t* const word = numbers<int32_t>({0});
    tensors_.back().compare = true;  // what it says does not depend on the order of threads
    return word;
  }
  // Results that depend on the order of threads: only the redzones and the status are compared.
  void do_not_compare() { compare_ = false; }

  // Runs `call` on what has been placed so far.
  void run(const std::function<tea_status()>& call) {
    if (gpu_) {
      gpu_->upload(device_, host_, used_);
      if (captured_) gpu_->begin_capture();
    }
    if (call() != TEA_OK) error_ = tea_error();
    if (gpu_ && !error_.empty()) throw std::runtime_error(error_);
    if (!gpu_) return;
    if (captured_) {
      gpu_->end_capture();
      gpu_->replay();
    }
    gpu_->download(host_, device_, used_);
    gpu_->wait();
  }

  // The differences from the other side; empty if there are none. Both are used up.
  std::string difference(Side& other) {
    if (error_ != other.error_) return "errors: " + error_ + ", and: " + other.error_;
    if (used_ != other.used_ || tensors_.size() != other.tensors_.size()) return "another case";
    for (size_t n = 0; n < tensors_.size(); ++n) {
      const Tensor& t = tensors_[n];
      if (const std::string found = difference(t, other); !found.empty())
        return "tensor " + std::to_string(n) + found;
      std::memset(host_ + t.at, 0, t.bytes);
      std::memset(other.host_ + t.at, 0, t.bytes);
    }
    for (size_t i = 0; i < used_; ++i)
      if (host_[i] != other.host_[i]) return "byte " + std::to_string(i) + " of a redzone";
    return {};
  }

 private:
  static constexpr int kRedzone = 0xA5;
  static constexpr size_t kZone = 64;
  struct Tensor {
    int32_t dtype;  // 0: bytes
    int64_t count;
    size_t at, bytes;
    Close close;
    bool compare;
  };

  template <class Fill>
  void* place(int32_t dtype, int64_t count, Close close, const Fill& fill) {
    return allocate(dtype, count, dtype_bytes(dtype), close, fill);
  }
  template <class Fill>
  uint8_t* allocate(int32_t dtype, int64_t count, int size, Close close, const Fill& fill) {
    const size_t width = static_cast<size_t>(size);
    const size_t bytes = static_cast<size_t>(count) * (dtype ? width : 1);
    const size_t at = (used_ + kZone + 15) / 16 * 16 + static_cast<size_t>(shift_) / width * width;
    if (at + bytes + kZone > kBytes) throw std::runtime_error("the case is too large");
    std::memset(host_ + used_, kRedzone, at + bytes + kZone - used_);
    fill(host_ + at, bytes);
    tensors_.push_back({dtype, count, at, bytes, close, compare_});
    used_ = at + bytes + kZone;
    return (gpu_ ? device_ : host_) + at;
  }

  std::string difference(const Tensor& t, const Side& other) const {
    const uint8_t *a = host_ + t.at, *b = other.host_ + t.at;
    if (!t.compare || !std::memcmp(a, b, t.bytes)) return {};
    if (!t.dtype) return ": numbers differ";
    for (int64_t i = 0; i < t.count; ++i) {
      const double x = load_real(a, t.dtype, i), y = load_real(b, t.dtype, i);
      if (!close_enough(t.dtype, t.close, x, y))
        return std::string(", ").append(dtype_name(t.dtype)) + " element " + std::to_string(i) +
               " of " + std::to_string(t.count) + ": " + std::to_string(x) + " and " +
               std::to_string(y);
    }
    return {};
  }

  Gpu* gpu_;
  bool captured_;
  int64_t shift_;
  bool compare_ = true;
  std::unique_ptr<uint8_t[]> memory_;  // of the host
  uint8_t *host_ = nullptr, *device_ = nullptr;
  size_t used_ = 0;
  std::vector<Tensor> tensors_;
  std::string error_;
};

struct OpCase {
  const char* name;
  void (*body)(Side&);
};

// Empty, or how the results of one draw of the case differ.
inline std::string host_and_gpu(const OpCase& c, uint64_t seed) {
  Side host(nullptr, seed), gpu(&gpu_of_thread(0), seed, seed % 2);
  c.body(host);
  c.body(gpu);
  const std::string found = host.difference(gpu);
  return found.empty() ? found
                       : std::string(c.name) + ", seed " + std::to_string(seed) + ": " + found;
}

}  // namespace tea::kit
