// Context parallelism: how the rows of a sequence are shared by ranks. See te_attention_cp.h.
#pragma once
#include <cstdint>

#include "math/host_device.h"

namespace tea {

// The widest tile of an engine's dropout cells: chunks that begin at multiples keep its fast path.
inline constexpr int64_t kCpChunkMultiple = 16;

// Rows of every chunk but the last ones, of a sequence with `length` rows.
TEA_HOST_DEVICE int64_t cp_chunk_rows(int64_t length, int64_t chunks) {
  if (length % chunks == 0) return length / chunks;
  const int64_t rows = length / chunks + 1;
  return (rows + kCpChunkMultiple - 1) / kCpChunkMultiple * kCpChunkMultiple;
}

// A run of rows that follow each other in the sequence: half open.
struct CpRows {
  int64_t begin, end;
  TEA_HOST_DEVICE int64_t count() const { return end - begin; }
};

// `members` share a sequence, each of them `group` consecutive ranks; one chunk for each rank, or
// two with zigzag.
struct CpSharding {
  int32_t members, group;
  bool zigzag;

  TEA_HOST_DEVICE int32_t pieces() const { return zigzag ? 2 : 1; }
  TEA_HOST_DEVICE int64_t chunks() const { return int64_t{members} * group * pieces(); }
};

// Piece 0 or 1 of a member: adjacent chunks, one for each rank of its group.
TEA_HOST_DEVICE CpRows cp_piece(const CpSharding& s, int32_t member, int32_t piece,
                                int64_t length) {
  const int64_t rows = cp_chunk_rows(length, s.chunks());
  const int64_t first =
      piece == 0 ? int64_t{member} * s.group : s.chunks() - (int64_t{member} + 1) * s.group;
  const int64_t begin = first * rows, end = (first + s.group) * rows;
  return {begin < length ? begin : length, end < length ? end : length};
}

}  // namespace tea
