// Where a sequence lies and how long it is, from device-resident metadata that nobody has checked:
// everything is clamped to capacity, and nonsense is reported, never followed.
#pragma once
#include <cstdint>

#include "math/host_device.h"

namespace tea {

struct Sequence {
  int64_t start;   // first token in the buffer; 0 unless ragged
  int64_t length;  // valid rows
  bool sane;       // false: the metadata was nonsense and has been clamped
};

// Dense: every row is valid and no array is read.
TEA_HOST_DEVICE Sequence dense_sequence(int64_t capacity) { return {0, capacity, true}; }

// Padded and paged: lengths only.
TEA_HOST_DEVICE Sequence padded_sequence(const int32_t* cu_seqlens, int64_t i, int64_t capacity) {
  const int64_t length = int64_t{cu_seqlens[i + 1]} - cu_seqlens[i];
  if (length < 0) return {0, 0, false};
  if (length > capacity) return {0, capacity, false};
  return {0, length, true};
}

// Ragged: `offsets` (or cu_seqlens itself) says where the sequence starts among `tokens` rows.
TEA_HOST_DEVICE Sequence ragged_sequence(const int32_t* cu_seqlens, const int32_t* offsets,
                                         int64_t i, int64_t capacity, int64_t tokens) {
  Sequence s = padded_sequence(cu_seqlens, i, capacity);
  s.start = offsets ? offsets[i] : cu_seqlens[i];
  if (s.length == 0) return {0, 0, s.sane};
  if (s.start < 0 || s.start >= tokens) return {0, 0, false};
  if (s.length > tokens - s.start) return {s.start, tokens - s.start, false};
  return s;
}

// The last of `count` sequences that starts at or before `row`: the one that holds the row, if one
// does; -1 if all start later. Starts that do not ascend lead to some sequence, never outside.
TEA_HOST_DEVICE int64_t find_sequence(const int32_t* starts, int64_t count, int64_t row) {
  int64_t low = -1, high = count;  // starts[low] <= row < starts[high]
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (starts[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// A page index, clamped into the pool; *sane turns false where it had to be.
TEA_HOST_DEVICE int64_t clamp_page(int32_t page, int64_t pages, bool* sane) {
  if (page >= 0 && page < pages) return page;
  *sane = false;
  return page < 0 ? 0 : pages - 1;
}

}  // namespace tea
