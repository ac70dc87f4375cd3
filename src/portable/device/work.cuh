// How a block of threads reads Work: its sequence, where its rows lie, the scalars in device
// memory. What device memory says is clamped here and reported; math/lengths.h has the rules.
#pragma once
#include "gpu/amax.cuh"
#include "math/bias.h"
#include "math/dropout.h"
#include "math/lengths.h"
#include "math/mask.h"
#include "portable/device/ptx.cuh"
#include "portable/work.h"

namespace tea::portable {

TEA_DEVICE void report(const Work& w, int32_t bit) {
  if (w.status) atomicOr(w.status, bit);
}

TEA_DEVICE Sequence sequence_of(const Work& w, const Side& side, int64_t b) {
  Sequence s = dense_sequence(side.capacity);
  if (side.form == TEA_RAGGED)
    s = ragged_sequence(side.cu_seqlens, side.offsets, b, side.capacity, side.tokens);
  else if (side.form != TEA_DENSE)
    s = padded_sequence(side.cu_seqlens, b, side.capacity);
  if (!s.valid) report(w, TEA_STATUS_BAD_LENGTHS);
  return s;
}

// One of batch, head, row, column.
TEA_DEVICE int64_t origin_of(const Work& w, int which) {
  bool valid = true;
  const int64_t at =
      clamp_origin(w.origin_device ? w.origin_device[which] : w.origin[which], &valid);
  if (!valid) report(w, TEA_STATUS_BAD_ORIGIN);
  return at;
}

TEA_DEVICE Item item_of(const Work& w, int64_t b) {
  if (w.equal) {
    Item item = w.every;
    item.b = b;
    return item;
  }
  const Sequence q = sequence_of(w, w.queries, b), kv = sequence_of(w, w.keys, b);
  return make_item(w.mask, b, q, kv, origin_of(w, 2), origin_of(w, 3));
}

// The element where row 0 of a head of a sequence begins. Not for paged keys.
TEA_DEVICE int64_t first_element(const Rows& rows, const Side& side, const Sequence& s, int64_t b,
                                 int64_t head) {
  const int64_t before = side.form == TEA_RAGGED ? s.start * rows.seq : b * rows.batch;
  return before + head * rows.head;
}

// The element where row i of a head of a sequence in pages begins.
TEA_DEVICE int64_t paged_element(const Work& w, const Rows& rows, const PageTable& table, int64_t b,
                                 int64_t head, int64_t i) {
  bool valid = true;
  const int64_t page =
      clamp_page(table.entries[b * table.stride + i / w.keys.page_size], table.pages, &valid);
  if (!valid) report(w, TEA_STATUS_BAD_PAGE);
  return page * rows.batch + i % w.keys.page_size * rows.seq + head * rows.head;
}

// The element of LSE and what has its shape for row 0; rows are per_row.seq apart.
TEA_DEVICE int64_t first_per_row(const Work& w, const Sequence& s, int64_t b, int64_t head) {
  const int64_t before =
      w.queries.form == TEA_RAGGED ? s.start * w.per_row.seq : b * w.per_row.batch;
  return before + head * w.per_row.head;
}

// A scalar of FP8 that may be missing.
TEA_DEVICE float scalar(const float* at) { return at ? *at : 1.0f; }

// A warp's largest into an amax. Every thread of it must call.
TEA_DEVICE void raise_by_warp(float* amax, float largest) {
  if (!amax) return;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, d));
  if (lane() == 0) raise_amax(amax, largest);
}

TEA_DEVICE float slope_of(const Work& w, int64_t b, int64_t head) {
  if (w.alibi == TEA_ALIBI_NONE) return 0;
  if (w.alibi == TEA_ALIBI_STANDARD) return static_cast<float>(alibi_slope(head, w.heads_q));
  return w.slopes[b * w.slopes_stride + head];
}

// The logit of the extra term in the denominator; -infinity: there is none.
TEA_DEVICE float sink_of(const Work& w, int64_t head) {
  if (w.softmax == TEA_SOFTMAX_LEARNABLE) return w.sink[head];
  return w.softmax == TEA_SOFTMAX_OFF_BY_ONE ? 0.0f : kMinusInfinity;
}

TEA_DEVICE RngState rng_of(const Work& w) {
  if (!w.rng) return {};
  return {static_cast<uint64_t>(w.rng[0]), static_cast<uint64_t>(w.rng[1])};
}

}  // namespace tea::portable
