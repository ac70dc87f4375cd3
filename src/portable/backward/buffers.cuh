// Positions in the workspace of the backward pass, and the rows and keys that attend to each other.
#pragma once
#include "portable/arguments.cuh"
#include "portable/backward/params.h"

namespace tea::portable {

// The rows that attend to some key of [begin, end).
TEA_DEVICE Columns attending_rows(const SequencePair& seq, int64_t begin, int64_t end) {
  const Columns all = attending_rows(seq);
  return {max(begin - seq.band.hi, all.begin), min(end - seq.band.lo, all.end)};
}
// The keys that some row of [begin, end) attends to.
TEA_DEVICE Columns attended_keys(const SequencePair& seq, int64_t begin, int64_t end) {
  return {visible_columns(seq.band, begin, seq.kv.length).begin,
          visible_columns(seq.band, end - 1, seq.kv.length).end};
}

// The entry of BackwardBuffers for row 0 of a head of a sequence.
TEA_DEVICE int64_t first_entry(const BackwardArguments& work, const SequencePair& seq,
                               int64_t head) {
  const bool ragged = work.args.queries.form == TEA_RAGGED;
  return head * work.buffers.rows +
         (ragged ? seq.q.start : seq.batch * work.args.queries.max_seqlen);
}

// The fp32 sums of dQ of a block of 16 rows. A complete block is stored 16 dimensions at a time, so
// that the elements that a warp adds at once are 512 consecutive bytes; the last rows of a
// sequence, if they are less than a block, are stored row by row. Both use the same memory.
struct DqBlock {
  float* sums;
  int row, dims;  // strides: from a row to the next one, from 16 dimensions to the next
  TEA_DEVICE float* at(int row_in_block, int column) const {
    return sums + row_in_block * row + column / 16 * dims;
  }
};
// first_row: of the block, a multiple of 16.
TEA_DEVICE DqBlock dq_block(const BackwardBuffers& buffers, int64_t first_entry, int first_row,
                            int length) {
  float* const first = buffers.dq + (first_entry + first_row) * buffers.width;
  return first_row + 16 <= length ? DqBlock{first, 16, 256} : DqBlock{first, buffers.width, 16};
}

}  // namespace tea::portable
