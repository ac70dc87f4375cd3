// Where cuDNN runs by default: plain problems for which it was measured to be faster than our own
// kernels, by versions of cuDNN whose results were compared with the oracle's.
#pragma once
#include <algorithm>
#include <span>

#include "core/problem.h"
#include "cudnn/bucket.h"

namespace tea::cudnn {

struct Faster {
  int sm;
  size_t first, last;  // versions of cuDNN, both included
  int32_t dim_qk, dim_v;
  int64_t least_rows;   // of a sequence
  int64_t least_pairs;  // of rows and keys, over batch and query heads
};

// bench/results/h200/backward-table.jsonl: each row begins where the time saved pays for
// building a graph, 65 ms or, of the first of a head dimension, a second: from 0.05 ms a run on. Up
// to 128 dimensions the backward kernels of hopper are faster (bench/results/h100/backward.jsonl).
inline constexpr Faster kFaster[] = {
    {90, 91900, 91900, 192, 128, 128, 1 << 25},
    {90, 91900, 91900, 256, 256, 128, 1 << 25},
};

// bench/results/h200/fp8.jsonl: at most 28 times as fast as portable, forward and backward, from
// 512 rows on. cuDNN has no backward pass of other head dimensions than 128.
inline constexpr Faster kFasterFp8[] = {
    {90, 91900, 91900, 128, 128, 512, 1 << 27},
};
inline constexpr Faster kFasterFp8Inference[] = {
    {90, 91900, 91900, 64, 64, 4096, 1 << 27},
    {90, 91900, 91900, 128, 128, 512, 1 << 27},
    {90, 91900, 91900, 256, 256, 4096, 1 << 27},
};
inline std::span<const Faster> fp8_rows(const Problem& p) {
  return p.training ? std::span<const Faster>(kFasterFp8) : kFasterFp8Inference;
}

// The problems of the table: gradients of dense self-attention, causal or full, without any option.
// Every row and every key has a result there, so that nothing can be NaN that is not used. In fp16
// no heads may share keys: each head's gradient is rounded before the sum, and overflows there.
inline bool has_no_options(const Problem& p) {
  const bool square = p.batch && p.seqlen_q && p.seqlen_q == p.seqlen_kv;
  return square && !p.deterministic && is_dense(p) && !p.window_left && !p.window_right &&
         !p.bias && !p.alibi && !p.softmax && p.softcap == 0 && !p.drops() && !p.lse_gradient;
}
inline bool is_plain(const Problem& p) {
  const bool fits = p.dtype == TEA_BF16 || (p.dtype == TEA_FP16 && p.heads_q == p.heads_kv);
  return p.training && fits && has_no_options(p);
}
// The same of FP8, in inference too. MAX and SUM_EXP are refused, since they have another base.
inline bool is_plain_fp8(const Problem& p) {
  return p.is_fp8() && !(p.outputs & ~TEA_OUTPUT_LSE) && has_no_options(p);
}

// Whether a row may apply to a plain problem, whatever the GPU and the library are.
inline bool has_row(const Problem& p, std::span<const Faster> rows = kFaster) {
  const auto real = [](int64_t n) { return static_cast<double>(n); };  // products may be huge
  const double pairs = real(p.batch) * real(p.heads_q) * real(p.seqlen_q) * real(p.seqlen_kv);
  return std::ranges::any_of(rows, [&](const Faster& row) {
    return row.dim_qk == p.dim_qk && row.dim_v == p.v_dim() && p.seqlen_q >= row.least_rows &&
           pairs >= real(row.least_pairs);
  });
}
inline bool has_row(const Problem& p, int sm, size_t version,
                    std::span<const Faster> rows = kFaster) {
  return std::ranges::any_of(rows, [&](const Faster& row) {
    return row.sm == sm && version >= row.first && version <= row.last && has_row(p, {&row, 1});
  });
}

}  // namespace tea::cudnn
