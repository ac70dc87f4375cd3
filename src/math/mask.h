// The columns that a row attends to. Causal masks, windows and their alignment are expressed as a
// diagonal band: a range of allowed differences column - row.
#pragma once
#include <cstdint>

#include "math/host_device.h"

namespace tea {

// A bound beyond any length, small enough that sums and differences do not overflow.
inline constexpr int64_t kUnbounded = int64_t{1} << 60;

// Column c is visible to row r iff lo <= c - r <= hi, rows and columns counted from the start of
// the sequence.
struct Band {
  int64_t lo, hi;
};

// The largest origin of a shard, such that differences of origins and lengths do not overflow.
inline constexpr int64_t kMaxOrigin = int64_t{1} << 40;

// An origin from device memory, clamped to the valid range; *valid becomes false if it was outside.
TEA_HOST_DEVICE int64_t clamp_origin(int64_t origin, bool* valid) {
  if (origin >= 0 && origin <= kMaxOrigin) return origin;
  *valid = false;
  return origin < 0 ? 0 : kMaxOrigin;
}

// Where a shard is in the global problem, and what is added to the diagonal's column - row.
struct Origin {
  int64_t batch, head, row, column, shift;
};

// A shift from device memory, clamped likewise.
TEA_HOST_DEVICE int64_t clamp_shift(int64_t shift, bool* valid) {
  if (shift >= -kMaxOrigin && shift <= kMaxOrigin) return shift;
  *valid = false;
  return shift < 0 ? -kMaxOrigin : kMaxOrigin;
}

struct Columns {
  int64_t begin, end;  // half open; empty iff begin >= end
};

// The mask fields of a Problem in its encoding (bound + 1; zero means no bound).
struct MaskRule {
  int32_t causal, bottom_right;
  int64_t window_left, window_right;
};

// The diagonal's column - row: 0, or for bottom-right alignment the difference of the actual
// lengths.
TEA_HOST_DEVICE int64_t diagonal(int32_t bottom_right, int64_t length_q, int64_t length_kv) {
  return bottom_right ? length_kv - length_q : 0;
}

// Decodes a bound of a Problem. Bounds beyond any length become unbounded, so that sums with them
// cannot overflow.
TEA_HOST_DEVICE int64_t window_bound(int64_t encoded) {
  return encoded && encoded - 1 < kUnbounded ? encoded - 1 : kUnbounded;
}

// origin_row, origin_col: the position of this shard's row 0 and column 0 in the global sequence.
TEA_HOST_DEVICE Band band(const MaskRule& rule, int64_t delta, int64_t origin_row,
                          int64_t origin_col) {
  const int64_t shift = delta + origin_row - origin_col;
  int64_t right = window_bound(rule.window_right);
  if (rule.causal && right > 0) right = 0;
  const int64_t left = window_bound(rule.window_left);
  return {left == kUnbounded ? -kUnbounded : shift - left,
          right == kUnbounded ? kUnbounded : shift + right};
}

// The visible columns of one row, within the actual length.
TEA_HOST_DEVICE Columns visible_columns(const Band& b, int64_t row, int64_t length_kv) {
  const int64_t begin = row + b.lo, end = row + b.hi + 1;
  return {begin > 0 ? begin : 0, end < length_kv ? end : length_kv};
}

TEA_HOST_DEVICE bool visible(const Band& b, int64_t row, int64_t col) {
  return col - row >= b.lo && col - row <= b.hi;
}

}  // namespace tea
