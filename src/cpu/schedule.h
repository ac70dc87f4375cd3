// The partition of forward into work items. It depends on the problem and its lengths, not on the
// number of threads, so that the results do not depend on it either.
#pragma once
#include <span>
#include <vector>

#include "cpu/blocks.h"

namespace tea::cpu {

inline constexpr int kCols = 64;  // keys of a tile

// The lanes of a tile lie across rows: with more rows than this most of them are in use.
inline constexpr int kFewRows = 16;

// Whether a kernel for blocks of few rows may take the group: decoding, without dropout.
bool is_few(const View& view, const Group& group);

// A block of rows.
struct Piece {
  const Group* group;
  int64_t first;  // row of the block
  int64_t parts = 1;
  int64_t first_slot = -1;  // of its parts, if there are several
};

// The keys of a piece, or a part of them, without keys that are masked for all rows of the block.
// Partial results of pieces with several parts have numbered slots, in the order of their keys.
struct Part {
  int64_t piece;
  Columns columns;
  int64_t slot = -1;
};

struct Schedule {
  bool few = false;  // for the kernel of few rows
  std::vector<Piece> pieces;
  std::vector<Part> parts;  // in the order in which they are best begun
  int64_t slots = 0;
};

// `few`: all of the groups are. The pieces point to them.
Schedule schedule(const View& view, std::span<const Group> groups, bool few);

}  // namespace tea::cpu
