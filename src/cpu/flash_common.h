// Included by the kernels of every instruction set before their target options, so that no inline
// function of these headers is compiled for instructions that the processor may lack.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>
#include <vector>

#include "cpu/flash.h"
#include "math/bias.h"
#include "math/dropout.h"
#include "math/load_store.h"
#include "math/softmax.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace tea::cpu {

// While this lives, subnormal results are what they are, or may be 0. They take a processor more
// than a hundred cycles each, but where a soft cap is huge they matter.
class Subnormals {
 public:
#if defined(__x86_64__)
  explicit Subnormals(bool kept) {
    constexpr unsigned kFlush = _MM_FLUSH_ZERO_ON;
    _mm_setcsr(kept ? before_ & ~kFlush : before_ | kFlush);
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
