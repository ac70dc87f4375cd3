// Dropout in the forward pass: of probabilities in the general kernels; where nothing else changes
// a weight, of weights in 16 bits.
#pragma once
#include "hopper/forward_work.cuh"
#include "math/dropout.h"

namespace tea::hopper {

// By the planner: what is the same for a whole tile.
TEA_DEVICE void add_dropout(Work& w, const Forward& f) {
  const int64_t* const rng = f.general.rng_state;
  bool sane;
  w.rng = {static_cast<uint64_t>(rng[0]), static_cast<uint64_t>(rng[1])};
  w.stream = dropout_stream(w.sequence + origin_of(f, 0, &sane), w.head + origin_of(f, 1, &sane));
}

// The thread's elements begin at this row of the sequence and this key of the tile.
struct Corner {
  int row, key;
};

// Probabilities that dropout takes become zero; the others are scaled at the end, with the row.
template <int kCount>
TEA_DEVICE void drop(float (&p)[kCount], const Forward& f, const Work& w, Corner at) {
  const RngState rng = w.rng;
  const uint32_t threshold = dropout_threshold(f.general.dropout);
  const int64_t row = w.global_row + at.row, key = w.global_key + at.key;
  if ((w.global_row | w.global_key) % 16 == 0) {  // the tile's cells are dropout's
#pragma unroll
    for (int c = 0; c < kCount / 8; ++c) {
      const Philox4 cell = dropout_cell(rng, w.stream, row, key + 16 * c);
#pragma unroll
      for (int k = 0; k < 8; ++k)
        if (dropout_uniform(cell, half_of(k) * 8, k / 4 * 8 + k % 2) < threshold) p[8 * c + k] = 0;
    }
    return;
  }
  uint64_t kept = 0;
#pragma unroll 1
  for (int i = 0; i < kCount; ++i) {
    const int64_t column = key + i / 4 * 8 + i % 2;
    const bool keeps = dropout_keeps(rng, w.stream, row + 8 * half_of(i), column, threshold);
    kept |= uint64_t{keeps} << i;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    if (!(kept >> i & 1)) p[i] = 0;
}

// Whether the cells of tiles are dropout's wherever a sequence's first key lies, and whether it
// takes anything at all.
inline bool drops_whole_cells(const Forward& f) {
  return !f.origin_device && f.origin[2] % 16 == 0 && f.origin[3] % 16 == 0 &&
         !f.mask.window_left && dropout_threshold(f.general.dropout) > 0;
}

// All bits of those of a word's two uniforms that are at or above the threshold, which is not 0,
// and none of the others: (a & b) + ((a ^ b) >> 1) is half a sum, and its highest bit the sum's
// carry.
TEA_DEVICE uint32_t kept_pair(uint32_t uniforms, uint32_t threshold) {
  const uint32_t rest = (0x10000u - threshold) * 0x10001u;
  return spread_signs((uniforms & rest) + (((uniforms ^ rest) & 0xFFFEFFFEu) >> 1));
}

// Pairs of weights as columns_as_operand() has them, where drops_whole_cells().
template <int kCount>
TEA_DEVICE void drop(uint32_t (&weights)[kCount][4], const Forward& f, const Work& w, Corner at) {
  const RngState rng = w.rng;
  const uint32_t threshold = dropout_threshold(f.general.dropout);
  const int64_t row = w.global_row + at.row, key = w.global_key + at.key;
#pragma unroll
  for (int c = 0; c < kCount; ++c) {
    const Philox4 cell = dropout_cell(rng, w.stream, row, key + 16 * c);
#pragma unroll
    for (int k = 0; k < 4; ++k) weights[c][k] &= kept_pair(cell.word[k / 2 + k % 2 * 2], threshold);
  }
}

}  // namespace tea::hopper
