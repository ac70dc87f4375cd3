// Blocks of query rows: up to kRows rows that share their keys and values, from
// one head or, where heads are short, from several heads of one group.
#pragma once
#include <cstddef>
#include <vector>

#include "cpu/view.h"
#include "math/mask.h"

namespace tea::cpu {

inline constexpr int kRows = 64;

// A sequence and the keys of one kv head.
struct Group {
  int64_t b, kv_head;
  Sequence q, kv;
  Origin origin;
  int64_t delta;  // column - row of the diagonal, before the origin
  Band band;
  int64_t heads;                      // query heads that share the keys
  Columns visible;                    // columns visible to any row
  const std::byte* packed = nullptr;  // K and V of `visible`, as the kernels want them

  int64_t rows() const { return heads * q.length; }  // of all its heads, one after the other
  int64_t blocks() const { return (rows() + kRows - 1) / kRows; }
};

Group make_group(const View& view, int64_t b, int64_t kv_head);
// Of every sequence and kv head.
std::vector<Group> make_groups(const View& view);

struct RowBlock {
  Group group;
  int count;
  int64_t row[kRows];
  int64_t head[kRows];
  Columns columns[kRows];  // columns visible to the row; empty for lanes beyond count
  Columns all;             // columns visible to any row
  Columns common;          // columns visible to every row

  RowAt at(int lane) const { return {group.q, group.b, head[lane], row[lane]}; }
  bool sees(int lane) const { return columns[lane].begin < columns[lane].end; }
};

// Rows [first, first + count) of the group, count at most kRows.
RowBlock make_block(const Group& group, int64_t first, int64_t count);

}  // namespace tea::cpu
