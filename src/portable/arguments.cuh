// Positions of sequences, heads and rows in the tensors of AttentionArguments. Invalid metadata in
// device memory is clamped and reported in the status word.
#pragma once
#include "gpu/amax.cuh"
#include "gpu/arguments.cuh"
#include "gpu/kv_scale.cuh"
#include "portable/device/ptx.cuh"

namespace tea::portable {

TEA_DEVICE Sequence sequence_of(const AttentionArguments& args, const SequenceLayout& layout,
                                int64_t batch) {
  const Sequence s = tea::sequence_of(layout, batch);
  if (!s.valid) report_status(args, TEA_STATUS_BAD_LENGTHS);
  return s;
}

TEA_DEVICE int64_t origin_of(const AttentionArguments& args, int64_t batch, int dimension) {
  bool valid = true;
  const int64_t origin = tea::origin_of(args, batch, dimension, &valid);
  if (!valid) report_status(args, TEA_STATUS_BAD_ORIGIN);
  return origin;
}

TEA_DEVICE SequencePair sequence_pair_of(const AttentionArguments& args, int64_t batch) {
  if (args.is_uniform) {
    SequencePair seq = args.uniform_pair;
    seq.batch = batch;
    return seq;
  }
  const Sequence q = sequence_of(args, args.queries, batch);
  const Sequence kv = sequence_of(args, args.keys, batch);
  bool valid = true;
  const SequencePair seq = tea::sequence_pair_of(args, batch, q, kv, &valid);
  if (!valid) report_status(args, TEA_STATUS_BAD_ORIGIN);
  return seq;
}

// The index of the first element of row 0 of a head. Not for paged keys.
TEA_DEVICE int64_t first_element(const StridedTensor& rows, const SequenceLayout& side,
                                 const Sequence& s, int64_t b, int64_t head) {
  const int64_t before = side.form == TEA_RAGGED ? s.start * rows.seq : b * rows.batch;
  return before + head * rows.head;
}

// The index of the first element of row i of a head of a paged sequence.
TEA_DEVICE int64_t paged_element(const AttentionArguments& args, const StridedTensor& rows,
                                 const PageTable& table, int64_t b, int64_t head, int64_t i) {
  bool valid = true;
  const int64_t page =
      clamp_page(table.entries[b * table.stride + i / args.keys.page_size], table.pages, &valid);
  if (!valid) report_status(args, TEA_STATUS_BAD_PAGE);
  return page * rows.batch + i % args.keys.page_size * rows.seq + head * rows.head;
}

// The index in LSE and the other row statistics of row 0 of a head.
TEA_DEVICE int64_t first_statistic(const AttentionArguments& args, const Sequence& s, int64_t b,
                                   int64_t head) {
  const int64_t before =
      args.queries.form == TEA_RAGGED ? s.start * args.statistics.seq : b * args.statistics.batch;
  return before + head * args.statistics.head;
}

// An FP8 scalar that may be absent.
TEA_DEVICE float scalar_or_1(const float* at) { return at ? *at : 1.0f; }

// Updates an amax with the maximum over the warp. All lanes must call.
TEA_DEVICE void update_amax_by_warp(float* amax, float largest) {
  if (!amax) return;
#pragma unroll
  for (int d = 16; d > 0; d /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, d));
  if (lane() == 0) raise_amax(amax, largest);
}

}  // namespace tea::portable
