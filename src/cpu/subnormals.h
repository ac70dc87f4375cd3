// How the processor treats subnormal numbers.
#pragma once
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tea::cpu {

// While this lives, subnormal results are what they are, or may be 0. They take a processor more
// than a hundred cycles each, but where a soft cap is huge they matter. Kept ones count as operands
// too: threads of other libraries, XLA's among them, may have a mode in which these are 0 as well.
class Subnormals {
 public:
#if defined(__x86_64__)
  explicit Subnormals(bool kept) {
    constexpr unsigned kFlush = _MM_FLUSH_ZERO_ON, kOperandsAreZero = 0x40;
    _mm_setcsr(kept ? before_ & ~(kFlush | kOperandsAreZero) : before_ | kFlush);
  }
  ~Subnormals() { _mm_setcsr(before_); }
#else
  explicit Subnormals(bool) {}
  ~Subnormals() {}
#endif
  Subnormals(const Subnormals&) = delete;
  Subnormals& operator=(const Subnormals&) = delete;

 private:
#if defined(__x86_64__)
  const unsigned before_ = _mm_getcsr();
#endif
};

}  // namespace tea::cpu
