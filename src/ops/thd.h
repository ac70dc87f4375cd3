// Conversion between ragged (thd) and padded (bshd) batches.
#pragma once
#include "math/lengths.h"
#include "ops/rows.h"

namespace tea {

void thd_to_bshd(const tea_thd_convert& args, const Place& place);
void bshd_to_thd(const tea_thd_convert& args, const Place& place);

// Both directions iterate over the padded side.
struct ThdMoves : Moves {
  tea_thd_convert a;
  Rows thd, bshd;
  bool to_bshd;
  int64_t runs;  // contiguous runs per row

  TEA_HOST_DEVICE Sequence sequence(int64_t i) const {
    return ragged_sequence(a.cu_seqlens, a.offsets, i, a.seqlen, a.tokens);
  }
  TEA_HOST_DEVICE void check(int64_t i) const {
    if (!sequence(i).valid) report(a.status, TEA_STATUS_BAD_LENGTHS);
  }
  TEA_HOST_DEVICE Move at(int64_t i) const {
    const int64_t row = quotient(i, runs), run = i - row * runs;
    const int64_t b = quotient(row, a.seqlen), t = row - b * a.seqlen;
    const Sequence s = sequence(b);
    char* const padded = bshd.at(b, t, run);
    if (t >= s.length) return {to_bshd && a.zero_fill ? padded : nullptr, nullptr};
    char* const token = thd.at(0, s.start + t, run);
    return to_bshd ? Move{padded, token} : Move{token, padded};
  }
};

// Zeroes the rows of thd without a token.
void zero_gaps_on_gpu(const ThdMoves& moves, const Place& place);

}  // namespace tea
