// Dropout decisions: the same bits on every engine, tile, pass and rank. Philox4x32-10 (Salmon et
// al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
//
// One call serves a cell of rows {i, i+8} x columns {j, j+1, j+8, j+9}, the elements that one
// thread holds of a 16-wide mma fragment. Its eight 16-bit uniforms are, low half of word 0 first,
// the four columns of row i, then the four columns of row i+8.
#pragma once
#include <cstdint>

#include "math/host_device.h"

namespace tea {

struct Philox4 {
  uint32_t word[4];
};

// The 64-bit product. Device code states the two halves explicitly, because nvcc otherwise adds
// zero to the upper half, and these products are the critical path of dropout.
TEA_HOST_DEVICE uint64_t product(uint32_t x, uint32_t y) {
#if defined(__CUDA_ARCH__)
  uint64_t z;
  asm("mul.wide.u32 %0, %1, %2;\n" : "=l"(z) : "r"(x), "r"(y));
  return z;
#else
  return uint64_t{x} * y;
#endif
}

TEA_HOST_DEVICE Philox4 philox4x32_10(Philox4 counter, uint64_t key) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = product(0xD2511F53u, counter.word[0]);
    const uint64_t p1 = product(0xCD9E8D57u, counter.word[2]);
    counter = {{static_cast<uint32_t>(p1 >> 32) ^ counter.word[1] ^ k0, static_cast<uint32_t>(p1),
                static_cast<uint32_t>(p0 >> 32) ^ counter.word[3] ^ k1, static_cast<uint32_t>(p0)}};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

struct RngState {
  uint64_t seed, offset;
};

// A probability is kept iff its 16-bit uniform is at least this: round(p * 65536). p is fp32 in
// fp64 problems too: the same keys are dropped for the same p whatever the type of a problem.
TEA_HOST_DEVICE uint32_t dropout_threshold(float p) {
  return static_cast<uint32_t>(p * 65536.0f + 0.5f);
}

// The third counter word. 4096 heads and a million sequences stay distinct.
TEA_HOST_DEVICE uint32_t dropout_stream(int64_t batch, int64_t head) {
  return static_cast<uint32_t>(batch * 4096 + head);
}

// The cell of a row and column, which are global and relative to the start of the sequence.
TEA_HOST_DEVICE Philox4 dropout_cell(RngState rng, uint32_t stream, int64_t row, int64_t col) {
  const Philox4 counter = {{static_cast<uint32_t>((row >> 4) * 8 + (row & 7)),
                            static_cast<uint32_t>((col >> 4) * 4 + ((col & 7) >> 1)), stream,
                            static_cast<uint32_t>(rng.offset)}};
  return philox4x32_10(counter, rng.seed ^ (rng.offset >> 32 << 32));
}

// The uniform of a row and column in their cell.
TEA_HOST_DEVICE uint32_t dropout_uniform(const Philox4& cell, int64_t row, int64_t col) {
  const int index = static_cast<int>(((row >> 3) & 1) * 4 + ((col >> 3) & 1) * 2 + (col & 1));
  return (cell.word[index >> 1] >> (16 * (index & 1))) & 0xFFFFu;
}

TEA_HOST_DEVICE bool dropout_keeps(RngState rng, uint32_t stream, int64_t row, int64_t col,
                                   uint32_t threshold) {
  return dropout_uniform(dropout_cell(rng, stream, row, col), row, col) >= threshold;
}

}  // namespace tea
