// A transposition across the four lanes that share a row of an accumulator.
#pragma once
#include "gpu/warp.cuh"

namespace tea::hopper {

// Transposes a 4 x 4 matrix of which each lane of a quad has a column: lane i receives element i of
// every lane, in the order of the lanes.
TEA_DEVICE void transpose_quad(uint32_t (&x)[4]) {
  const int i = lane() % 4;
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = i & step;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j & step) continue;
      const uint32_t kept = upper ? x[j + step] : x[j], sent = upper ? x[j] : x[j + step];
      const uint32_t received = __shfl_xor_sync(0xffffffff, sent, step);
      x[j] = upper ? received : kept;
      x[j + step] = upper ? kept : received;
    }
  }
}

}  // namespace tea::hopper
