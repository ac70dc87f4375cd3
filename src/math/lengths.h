// The start and length of a sequence from metadata in device memory, which has not been validated:
// values are clamped to the capacity, and invalid ones are reported.
#pragma once
#include <cstdint>

#include "math/host_device.h"

namespace tea {

struct Sequence {
  int64_t start;   // first token in the buffer; 0 unless ragged
  int64_t length;  // valid rows
  bool valid;      // false: the metadata was invalid and has been clamped
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

// Ragged: the sequence starts at offsets[i] (without offsets: cu_seqlens[i]) among `tokens` rows.
TEA_HOST_DEVICE Sequence ragged_sequence(const int32_t* cu_seqlens, const int32_t* offsets,
                                         int64_t i, int64_t capacity, int64_t tokens) {
  Sequence s = padded_sequence(cu_seqlens, i, capacity);
  s.start = offsets ? offsets[i] : cu_seqlens[i];
  if (s.length == 0) return {0, 0, s.valid};
  if (s.start < 0 || s.start >= tokens) return {0, 0, false};
  if (s.length > tokens - s.start) return {s.start, tokens - s.start, false};
  return s;
}

// The last of `count` sequences that starts at or before `row`, which is the one that contains the
// row if any does; -1 if all start later. If starts do not ascend, the result is still in range.
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

// A page index, clamped to the pool; *valid becomes false if it was outside.
TEA_HOST_DEVICE int64_t clamp_page(int32_t page, int64_t pages, bool* valid) {
  if (page >= 0 && page < pages) return page;
  *valid = false;
  return page < 0 ? 0 : pages - 1;
}

}  // namespace tea
