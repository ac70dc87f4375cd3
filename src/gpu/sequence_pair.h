// The query and key sequences of one batch entry, and the keys that their rows attend to.
#pragma once
#include <cstdint>

#include "math/lengths.h"
#include "math/mask.h"

namespace tea {

struct SequencePair {
  int64_t batch;
  Sequence q, kv;
  int64_t diagonal;  // key - row on the mask's diagonal, `shift` included
  int64_t origin_row, origin_col, shift;
  Band band;
  Columns attended;  // the keys that some row attends to; kernels load all others as zero
};

TEA_HOST_DEVICE SequencePair make_sequence_pair(const MaskRule& mask, int64_t batch,
                                                const Sequence& q, const Sequence& kv,
                                                int64_t origin_row, int64_t origin_col,
                                                int64_t shift) {
  SequencePair pair;
  pair.batch = batch;
  pair.q = q, pair.kv = kv;
  pair.diagonal = diagonal(mask.bottom_right, q.length, kv.length) + shift;
  pair.origin_row = origin_row, pair.origin_col = origin_col, pair.shift = shift;
  pair.band = band(mask, pair.diagonal, origin_row, origin_col);
  pair.attended = {visible_columns(pair.band, 0, kv.length).begin,
                   visible_columns(pair.band, q.length - 1, kv.length).end};
  if (q.length == 0) pair.attended = {0, 0};
  return pair;
}

// The rows that attend to some key.
TEA_HOST_DEVICE Columns attending_rows(const SequencePair& pair) {
  if (pair.kv.length == 0) return {0, 0};
  const int64_t begin = -pair.band.hi, end = pair.kv.length - pair.band.lo;
  return {begin > 0 ? begin : 0, end < pair.q.length ? end : pair.q.length};
}

}  // namespace tea
