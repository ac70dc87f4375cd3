// A sequence as its kernels need it: where it lies, how long it is, and what its rows may see.
#pragma once
#include <cstdint>

#include "math/lengths.h"
#include "math/mask.h"

namespace tea::portable {

struct Item {
  int64_t b;
  Sequence q, kv;
  int64_t delta;  // of the diagonal
  int64_t origin_row, origin_col;
  Band band;
  Columns attended;  // the keys that some row of the sequence attends to; others load as zero
};

TEA_HOST_DEVICE Item make_item(const MaskRule& mask, int64_t b, const Sequence& q,
                               const Sequence& kv, int64_t origin_row, int64_t origin_col) {
  Item item;
  item.b = b;
  item.q = q, item.kv = kv;
  item.delta = diagonal(mask.bottom_right, q.length, kv.length);
  item.origin_row = origin_row, item.origin_col = origin_col;
  item.band = band(mask, item.delta, origin_row, origin_col);
  item.attended = {visible_columns(item.band, 0, kv.length).begin,
                   visible_columns(item.band, q.length - 1, kv.length).end};
  if (q.length == 0) item.attended = {0, 0};
  return item;
}

}  // namespace tea::portable
