// Dropout in the forward pass: of P in fp32 in the general kernels, of the packed 16-bit P in the
// kernels for dropout alone.
#pragma once
#include "hopper/forward/work_tile.cuh"

namespace tea::hopper {

// Called by the scheduler warp.
TEA_DEVICE void describe_dropout(WorkTile& w, const AttentionArguments& a) {
  bool valid;
  w.rng = rng_of(a);
  w.dropout_stream = dropout_stream(w.batch + origin_of(a, w.batch, 0, &valid),
                                    w.head + origin_of(a, w.batch, 1, &valid));
}

// The row of the sequence and the key of the tile of the thread's first element.
struct ElementOrigin {
  int row, key;
};

// Zeroes the dropped elements of P. The others are scaled once, when O is normalised.
template <int kCount>
TEA_DEVICE void apply_dropout(float (&p)[kCount], const AttentionArguments& a, const WorkTile& w,
                              ElementOrigin at) {
  const RngState rng = w.rng;
  const uint32_t threshold = a.dropout_threshold;
  const int64_t row = w.global_row + at.row, key = w.global_key + at.key;
  if ((w.global_row | w.global_key) % 16 == 0) {  // the cells of dropout are aligned with the tile
#pragma unroll
    for (int c = 0; c < kCount / 8; ++c) {
      const Philox4 cell = dropout_cell(rng, w.dropout_stream, row, key + 16 * c);
#pragma unroll
      for (int k = 0; k < 8; ++k)
        if (dropout_uniform(cell, row_slot(k) * 8, k / 4 * 8 + k % 2) < threshold) p[8 * c + k] = 0;
    }
    return;
  }
  uint64_t kept = 0;
#pragma unroll 1
  for (int i = 0; i < kCount; ++i) {
    const int64_t column = key + i / 4 * 8 + i % 2;
    const bool keeps =
        dropout_keeps(rng, w.dropout_stream, row + 8 * row_slot(i), column, threshold);
    kept |= uint64_t{keeps} << i;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (!(kept >> i & 1)) p[i] = 0;
}

// Sets all bits of each 16-bit half whose uniform is at or above the threshold, which is not 0, and
// clears the other half: (a & b) + ((a ^ b) >> 1) is half of a sum, and its highest bit is the
// carry of the sum.
TEA_DEVICE uint32_t kept_pair(uint32_t uniforms, uint32_t threshold) {
  const uint32_t rest = (0x10000u - threshold) * 0x10001u;
  return spread_sign_bits((uniforms & rest) + (((uniforms ^ rest) & 0xFFFEFFFEu) >> 1));
}

// Zeroes the dropped elements of P in the layout of accumulator_as_operand(), where
// dropout_is_tile_aligned().
template <int kCount>
TEA_DEVICE void apply_dropout(uint32_t (&p)[kCount][4], const AttentionArguments& a,
                              const WorkTile& w, ElementOrigin at) {
  const RngState rng = w.rng;
  const uint32_t threshold = a.dropout_threshold;
  const int64_t row = w.global_row + at.row, key = w.global_key + at.key;
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    const Philox4 cell = dropout_cell(rng, w.dropout_stream, row, key + 16 * c);
#pragma unroll
    for (int k = 0; k < 4; ++k) p[c][k] &= kept_pair(cell.word[k / 2 + k % 2 * 2], threshold);
  }
}

}  // namespace tea::hopper
