// The boxes of rows that make a block of keys in pages, each within one page.
#pragma once
#include "hopper/forward/work_tile.cuh"

namespace tea::hopper {

// Boxes have as many rows as divide a page and a block: a power of two, at least kPageMultiple.
inline int box_rows(int page_size, int block_n) {
  const int bits = page_size | block_n;
  return bits & -bits;
}

// Counts keys from a multiple of a box's rows, so that every box is within one page. `lo`, which is
// 0 where keys are skipped, then is the number of keys of the first box that no row attends to.
// Where all keys are within one box, they are counted from the first of them as before.
TEA_HOST_DEVICE void align_to_boxes(SequenceBounds& b, int box_rows) {
  const int offset = b.skipped_keys & (box_rows - 1);
  if (offset + b.seqlen_kv <= box_rows) return;
  b.skipped_keys -= offset, b.start_kv -= offset, b.seqlen_kv += offset;
  b.lo += offset, b.hi += offset;
}

// The coordinates of a box in the tensor map of a page (row_box.cuh), and the number of the page in
// the sequence. Keys that no row attends to, which may hold NaN, are outside y and read as zeros:
// those past the last one, and in the first box of a sequence those before the first one. The
// latter box has a negative y, with which TMA also accesses the start of a map. It is therefore
// loaded by a map of its own, which starts at the first row of the page.
struct PageBox {
  int page, y, z;
};

// Box `number` of a block. Boxes past the last key repeat the last box with a key: their keys are
// masked, but P = 0 times what the memory of the stage held before might be NaN.
template <int kBlockN, class D>
TEA_HOST_DEVICE PageBox page_box(const SequenceBounds& b, const D& page_size, int rows_log2,
                                 int block, int number) {
  const int rows = 1 << rows_log2, last = (b.seqlen_kv - 1) >> rows_log2;
  const int key = min((block * kBlockN >> rows_log2) + number, last) << rows_log2;
  const int count = min(b.seqlen_kv - key, rows), skipped = max(b.lo - key, 0);
  const int page = (b.start_kv + key) / page_size;
  const int row = b.start_kv + key - page * page_size;
  if (skipped > 0) return {page, -skipped, row + skipped};
  return {page, rows - count, row + count};
}

}  // namespace tea::hopper
