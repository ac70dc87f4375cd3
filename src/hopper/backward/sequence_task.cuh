// A warp's view of the rows and keys of one sequence, ahead of the tiles: the row terms of the rows
// that attend to some key, zeros in the gradients of all others.
#pragma once
#include "hopper/backward/params.cuh"

namespace tea::hopper::backward {

// A team of at least four lanes shares a head, and has four of them in turn, whose loads are under
// way together.
inline constexpr int kHeadsPerTeam = 4;

template <Type kType>
TEA_DEVICE float2 unpack(uint32_t pair) {
  if constexpr (kType == Type::kFp16)
    return {half_to_float(static_cast<uint16_t>(pair)), half_to_float(pair >> 16)};
  else
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000)};
}

// Eight elements of a tensor as they are in memory.
template <bool kFp32>
struct EightElements {
  uint4 words[kFp32 ? 2 : 1];

  TEA_DEVICE void load(const StridedTensor& from, int64_t at) {
    const auto* const bytes = static_cast<const char*>(from.data) + at * (kFp32 ? 4 : 2);
#pragma unroll
    for (int i = 0; i < (kFp32 ? 2 : 1); ++i) words[i] = reinterpret_cast<const uint4*>(bytes)[i];
  }
  // Elements 2i and 2i + 1.
  template <Type kType>
  TEA_DEVICE float2 pair(int i) const {
    const uint32_t* const word = reinterpret_cast<const uint32_t*>(words);
    if constexpr (kFp32)
      return {__uint_as_float(word[2 * i]), __uint_as_float(word[2 * i + 1])};
    else
      return unpack<kType>(word[i]);
  }
};

// Half of x as three bf16 numbers and 0.
TEA_DEVICE uint2 split(float x) {
  float rest = 0.5f * x;
  uint32_t parts[3];
#pragma unroll
  for (uint32_t& part : parts) {
    part = pack_bf16(rest, 0);
    rest -= unpack<Type::kBf16>(part).x;
  }
  return {parts[0] | parts[1] << 16, parts[2]};
}
// The products multiply the parts of either term by 0 in the other one's sum, where infinity and
// NaN would become NaN. A score of infinity becomes a finite one that leaves no probability. That
// of NaN stays, since the gradients of the row's probabilities are NaN too. But delta is infinite
// or NaN if fp16 cannot hold O: then twice the largest bf16 number, with its sign, gives infinity
// there, for NaN too, and dV stays right.
TEA_DEVICE uint2 split_score(float x) {
  constexpr float kLargest = 0x1p127f;
  return split(isnan(x) ? x : fminf(fmaxf(x, -kLargest), kLargest));
}
TEA_DEVICE uint2 split_gradient(float x) {
  const uint32_t largest = 0x7F7F | (__float_as_uint(x) >> 16 & 0x8000);
  return isfinite(x) ? split(x) : uint2{largest, 0};
}
TEA_DEVICE float sum_of(const uint2& parts) {
  const float2 high = unpack<Type::kBf16>(parts.x);
  return 2 * (high.x + high.y + unpack<Type::kBf16>(parts.y).x);
}

// Zeroes a row of all heads, whose first element is `first`. Called by a warp.
TEA_DEVICE void zero_row(const StridedTensor& x, int64_t first, int heads, int dim) {
  const int per_chunk = x.dtype == TEA_FP32 ? 4 : 8;  // elements of 16 bytes
  const int chunks = dim / per_chunk;
  for (int i = lane(); i < heads * chunks; i += 32) {
    const int64_t at = first + i / chunks * x.head + i % chunks * per_chunk;
    *reinterpret_cast<uint4*>(static_cast<char*>(x.data) + at * 16 / per_chunk) = uint4{};
  }
}

// Whether gradients of rows, or of keys, are added to what is there.
TEA_DEVICE bool adds_to(const AttentionArguments& a, bool rows) {
  return a.accumulate & (rows ? TEA_ACCUMULATE_ROWS : TEA_ACCUMULATE_KEYS);
}

// A warp's view of the rows and keys of one sequence.
template <Type kType, int kBlockM>
struct SequenceTask {
  const KernelParams& p;
  const AttentionArguments& a = p.args;
  int batch;
  SequencePair pair;
  Columns rows, keys;  // that take part in attention
  int row_block;

  TEA_DEVICE SequenceTask(const KernelParams& params, int b) : p(params), batch(b) {
    bool valid = true;
    pair = sequence_pair_of(a, b, sequence_of(a.queries, b), sequence_of(a.keys, b), &valid);
    rows = attending_rows(pair), keys = pair.attended;
    if (rows.begin >= rows.end || keys.begin >= keys.end) rows = keys = {0, 0};
    row_block = static_cast<int>(p.work.row_blocks.first(a.queries, kBlockM, b, pair.q.length));
  }
  TEA_DEVICE int attending() const { return static_cast<int>(rows.end - rows.begin); }
  TEA_DEVICE int padded() const { return (attending() + kBlockM - 1) / kBlockM * kBlockM; }

  TEA_DEVICE int64_t batch_offset(const SequenceLayout& layout, int64_t stride) const {
    return layout.form == TEA_RAGGED ? 0 : batch * stride;
  }
  TEA_DEVICE RowTerms& terms_of(int head, int row) const {
    const int64_t block = head * p.work.row_blocks.per_head + row_block + row / kBlockM;
    return p.work.terms[block * kBlockM + row % kBlockM];
  }
  // lse: +infinity if the row has no probabilities.
  TEA_DEVICE void set_terms(int head, int row, float lse, float delta) const {
    terms_of(head, row) = {split_score(-lse * p.inverse_scale), split_gradient(-delta)};
  }

  // Row `row` of those that attend, of the heads from `first_head` on that the warp's teams of
  // `team` lanes, a power of two, take. A lane has eight columns of O and dO of each of its team's
  // heads, and finds the terms of one of them.
  template <bool kFp32O>
  TEA_DEVICE void compute_terms(int row, int first_head, int team) const {
    const int64_t q = pair.q.start + rows.begin + row;
    const int member = lane() % team, teams = 32 / team, column = member * 8;
    const int64_t o = batch_offset(a.queries, a.o.batch) + q * a.o.seq + column;
    const int64_t dout = batch_offset(a.queries, a.dout.batch) + q * a.dout.seq + column;
    const int base = first_head + lane() / team;
    EightElements<kFp32O> x[kHeadsPerTeam];
    EightElements<false> y[kHeadsPerTeam];
#pragma unroll
    for (int i = 0; i < kHeadsPerTeam; ++i) {
      const int h = base + i * teams;
      x[i] = {}, y[i] = {};
      if (h >= a.heads_q || column >= a.dim_v) continue;
      x[i].load(a.o, o + h * a.o.head);
      y[i].load(a.dout, dout + h * a.dout.head);
    }
    const RowStatistics& per_row = a.statistics;
    const int own = base + member * teams;
    const bool has_own = member < kHeadsPerTeam && own < a.heads_q;
    float lse = 0, delta = 0;
    if (has_own) {
      const int64_t at =
          batch_offset(a.queries, per_row.batch) + q * per_row.seq + own * per_row.head;
      lse = per_row.lse[at];
      if (per_row.dlse) delta = -per_row.dlse[at];
    }
#pragma unroll
    for (int i = 0; i < kHeadsPerTeam; ++i) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 u = x[i].template pair<kType>(j), v = y[i].template pair<kType>(j);
        sum = fmaf(u.x, v.x, sum), sum = fmaf(u.y, v.y, sum);
      }
      for (int n = team / 2; n > 0; n /= 2) sum += __shfl_xor_sync(0xffffffff, sum, n);
      if (member == i) delta += sum;
    }
    // A row whose scores are all -infinity has no probabilities.
    if (has_own) set_terms(own, row, lse == kMinusInfinity ? -kMinusInfinity : lse, delta);
  }
  TEA_DEVICE void zero(const StridedTensor& x, const SequenceLayout& layout, int64_t row, int heads,
                       int dim) const {
    if (!adds_to(a, &layout == &a.queries))
      zero_row(x, batch_offset(layout, x.batch) + row * x.seq, heads, dim);
  }
  // The index-th row that a tensor has for the sequence, without those in `taken`.
  static TEA_DEVICE int64_t other(int64_t index, const Columns& taken) {
    return index < taken.begin ? index : index + taken.end - taken.begin;
  }

  // The rows of dQ: first those that attend, up to a whole row block, then the others.
  TEA_DEVICE int query_tasks() const {
    const int64_t all = a.queries.form == TEA_RAGGED ? pair.q.length : a.queries.max_seqlen;
    return padded() + static_cast<int>(all) - attending();
  }
  // Rows without terms to compute are done for all heads together with the first ones.
  TEA_DEVICE void do_query(int index, int first_head, int team) const {
    if (index < attending() && a.o.dtype == TEA_FP32)
      compute_terms<true>(index, first_head, team);
    else if (index < attending())
      compute_terms<false>(index, first_head, team);
    else if (first_head > 0)
      return;
    else if (index < padded())
      for (int h = lane(); h < a.heads_q; h += 32) set_terms(h, index, -kMinusInfinity, 0);
    else
      zero(a.dq, a.queries, pair.q.start + other(index - padded(), rows), a.heads_q, a.dim_qk);
  }
  // The keys that no row attends to.
  TEA_DEVICE int key_tasks() const {
    const int64_t all = a.keys.form == TEA_RAGGED ? pair.kv.length : a.keys.max_seqlen;
    return static_cast<int>(all - (keys.end - keys.begin));
  }
  TEA_DEVICE void do_key(int index) const {
    const int64_t key = pair.kv.start + other(index, keys);
    zero(a.dk, a.keys, key, a.heads_kv, a.dim_qk);
    zero(a.dv, a.keys, key, a.heads_kv, a.dim_v);
  }
};

}  // namespace tea::hopper::backward
