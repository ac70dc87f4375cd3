// A warp's view of the rows and keys of one sequence, ahead of the tiles: the row terms of the rows
// that attend to some key, zeros in the gradients of all others.
#pragma once
#include "hopper/backward/params.cuh"

namespace tea::hopper::backward {

template <Type kType>
TEA_DEVICE float2 unpack(uint32_t pair) {
  if constexpr (kType == Type::kFp16)
    return {half_to_float(static_cast<uint16_t>(pair)), half_to_float(pair >> 16)};
  else
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000)};
}

// Eight elements of a tensor as they are in memory. They are the first to be evicted from L2: O and
// dO of a large problem exceed it, and would displace lines that it then had to write to memory.
template <bool kFp32>
struct EightElements {
  uint4 words[kFp32 ? 2 : 1];

  TEA_DEVICE void load(const char* bytes) {
#pragma unroll
    for (int i = 0; i < (kFp32 ? 2 : 1); ++i)
      words[i] = __ldcs(reinterpret_cast<const uint4*>(bytes) + i);
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

  // Rows `first` to `last` - 1 of those that attend, of the heads from `first_head` on that the
  // warp's teams of kTeam lanes take. A lane has eight columns of O and dO of each of its team's
  // heads. The sums over lanes begin with an exchange of heads, so that a quarter of the lanes have
  // the sum of one head each at the end. Rows are taken in pairs, whose loads are under way
  // together; lanes without columns or a head load others in their place.
  template <bool kFp32O, int kTeam>
  TEA_DEVICE void compute_terms(int first, int last, int first_head) const {
    static_assert(kHeadsPerTeam == 4 && kTeam >= 4);
    constexpr int kTeams = 32 / kTeam, kLanesPerHead = kTeam / 4;
    constexpr int kPair = kFp32O || kLanesPerHead == 1 ? 1 : 2;
    const int member = lane() % kTeam, base = first_head + lane() / kTeam;
    const bool has_columns = member * 8 < a.dim_v;
    const int column = has_columns ? member * 8 : 0;
    const int head = min(base, a.heads_q - 1), more_heads = (a.heads_q - 1 - head) / kTeams;
    const int64_t q = pair.q.start + rows.begin + first;
    const auto address = [&](const StridedTensor& x, int bytes) {
      const int64_t at = batch_offset(a.queries, x.batch) + q * x.seq + head * x.head + column;
      return static_cast<const char*>(x.data) + at * bytes;
    };
    constexpr int kBytesO = kFp32O ? 4 : 2;
    const char *o = address(a.o, kBytesO), *dout = address(a.dout, 2);
    const int64_t o_row = a.o.seq * kBytesO, dout_row = a.dout.seq * 2;
    const int64_t o_head = kTeams * a.o.head * kBytesO, dout_head = kTeams * a.dout.head * 2;
    const int own = base + member / kLanesPerHead * kTeams, own_row = member % kLanesPerHead;
    const RowStatistics& per_row = a.statistics;
    const int64_t at =
        batch_offset(a.queries, per_row.batch) + (q + own_row) * per_row.seq + own * per_row.head;
    RowTerms* const terms = &terms_of(own, 0) + first + own_row;
    const bool has_own = own_row < kPair && own < a.heads_q;
#pragma unroll 1
    for (int row = 0; row < last - first; row += kPair) {
      EightElements<kFp32O> x[kPair][kHeadsPerTeam];
      EightElements<false> y[kPair][kHeadsPerTeam];
#pragma unroll
      for (int r = 0; r < kPair; ++r) {
        const int second = r > 0 && row + r < last - first;  // else the first row again
#pragma unroll
        for (int i = 0; i < kHeadsPerTeam; ++i) {
          x[r][i].load(o + min(i, more_heads) * o_head + second * o_row);
          y[r][i].load(dout + min(i, more_heads) * dout_head + second * dout_row);
        }
      }
      const bool mine = has_own && row + own_row < last - first;
      float lse = 0, delta = 0, sum[kPair];
      if (mine) lse = per_row.lse[at + row * per_row.seq];
      if (mine && per_row.dlse) delta = -per_row.dlse[at + row * per_row.seq];
#pragma unroll
      for (int r = 0; r < kPair; ++r) {
        float sums[kHeadsPerTeam] = {};
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int i = 0; i < kHeadsPerTeam; ++i) {
            const float2 u = x[r][i].template pair<kType>(j), v = y[r][i].template pair<kType>(j);
            sums[i] = fmaf(u.x, v.x, sums[i]), sums[i] = fmaf(u.y, v.y, sums[i]);
          }
#pragma unroll
        for (float& s : sums) s = has_columns ? s : 0;
        const auto exchange = [&](float lower, float upper, int distance) {
          const bool is_upper = member & distance;
          const float other = __shfl_xor_sync(0xffffffff, is_upper ? lower : upper, distance);
          return (is_upper ? upper : lower) + other;
        };
        const float even = exchange(sums[0], sums[2], kTeam / 2);
        const float odd = exchange(sums[1], sums[3], kTeam / 2);
        sum[r] = exchange(even, odd, kTeam / 4);
#pragma unroll
        for (int n = kTeam / 8; n > 0; n /= 2) sum[r] += __shfl_xor_sync(0xffffffff, sum[r], n);
      }
      delta += kPair == 2 && own_row == 1 ? sum[kPair - 1] : sum[0];
      // A row whose scores are all -infinity has no probabilities.
      if (lse == kMinusInfinity) lse = -kMinusInfinity;
      if (mine) terms[row] = {split_score(-lse * p.inverse_scale), split_gradient(-delta)};
      o += kPair * o_row, dout += kPair * dout_row;
    }
  }
  template <bool kFp32O>
  TEA_DEVICE void compute_terms(int first, int last, int first_head) const {
    if (p.tasks.team == 16)
      compute_terms<kFp32O, 16>(first, last, first_head);
    else if (p.tasks.team == 8)
      compute_terms<kFp32O, 8>(first, last, first_head);
    else
      compute_terms<kFp32O, 4>(first, last, first_head);
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
  // Rows `first` to `last` - 1 of the tasks, of a chunk of heads. Gradients to be zeroed are so for
  // all heads together with the first chunk. Terms come last, where the fewest registers are in
  // use.
  TEA_DEVICE void do_queries(int first, int last, int first_head) const {
    const int head = first_head + lane(), end = min(first_head + p.tasks.chunk_heads(), a.heads_q);
    for (int index = max(first, attending()); index < min(last, padded()); ++index)
      if (head < end) set_terms(head, index, -kMinusInfinity, 0);
    if (first_head == 0)
      for (int index = max(first, padded()); index < last; ++index)
        zero(a.dq, a.queries, pair.q.start + other(index - padded(), rows), a.heads_q, a.dim_qk);
    last = min(last, attending());
    if (first >= last) return;
    if (a.o.dtype == TEA_FP32)
      compute_terms<true>(first, last, first_head);
    else
      compute_terms<false>(first, last, first_head);
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
