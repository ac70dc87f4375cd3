// The amax of FP8 tensors in memory: the one rule by which every kernel updates it.
#pragma once
#include "gpu/ptx.cuh"

namespace tea {

// Raises an amax in memory to a value that is at least 0. A NaN is ignored as in fmax(), whether it
// is the value or is stored in memory.
TEA_DEVICE void raise_amax(float* amax, float value) {
  auto* const word = reinterpret_cast<int*>(amax);
  int seen = *static_cast<volatile int*>(word);
  while (value >= 0 && !(__int_as_float(seen) >= value)) {
    const int before = atomicCAS(word, seen, __float_as_int(value));
    if (before == seen) return;
    seen = before;
  }
}

}  // namespace tea
