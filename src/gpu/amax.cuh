// The largest magnitude that a tensor had, in memory: the one rule by which every kernel raises it.
#pragma once
#include "gpu/ptx.cuh"

namespace tea {

// Raises an amax, in memory, to a value of at least 0. NaN is passed over, as fmax does: a new one,
// and one that is there already.
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
