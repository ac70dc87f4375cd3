// How kernels read their arguments: lengths, origins and other values in device memory are clamped
// to the valid range (math/lengths.h, math/mask.h).
#pragma once
#include "gpu/arguments.h"
#include "gpu/warp.cuh"
#include "math/bias.h"
#include "math/dropout.h"

namespace tea {

// The query or key sequence of a batch entry; `valid` is false if its metadata had to be clamped.
TEA_HOST_DEVICE Sequence sequence_of(const SequenceLayout& layout, int64_t batch) {
  if (layout.form == TEA_RAGGED)
    return ragged_sequence(layout.cu_seqlens, layout.offsets, batch, layout.max_seqlen,
                           layout.tokens);
  if (layout.form == TEA_DENSE) return dense_sequence(layout.max_seqlen);
  return padded_sequence(layout.cu_seqlens, batch, layout.max_seqlen);
}

// Whether some sequence contains a token of a ragged tensor. If starts ascend, as they do unless
// the caller permuted the sequences, the binary search finds the right one.
TEA_DEVICE bool is_in_some_sequence(const SequenceLayout& layout, int batch, int64_t token) {
  const auto contains = [&](int b) {
    const Sequence s = sequence_of(layout, b);
    return token >= s.start && token < s.start + s.length;
  };
  const int32_t* const starts = layout.offsets ? layout.offsets : layout.cu_seqlens;
  const auto likely = static_cast<int>(find_sequence(starts, batch, token));
  if (likely >= 0 && contains(likely)) return true;
#pragma unroll 1
  for (int b = 0; b < batch; ++b)
    if (contains(b)) return true;
  return false;
}

// The position of a sequence of the problem in the global one. dimension: 0 batch, 1 head, 2 row,
// 3 column. *valid becomes false if the value had to be clamped, here and below.
TEA_HOST_DEVICE int64_t origin_of(const AttentionArguments& args, int64_t batch, int dimension,
                                  bool* valid) {
  if (!args.origin_device) return clamp_origin(args.origin[dimension], valid);
  return clamp_origin(args.origin_device[batch * args.origin_stride + dimension], valid);
}

// The number that is added to the diagonal of a sequence.
TEA_HOST_DEVICE int64_t shift_of(const AttentionArguments& args, int64_t batch, bool* valid) {
  if (!args.origin_stride) return args.shift;
  return clamp_shift(args.origin_device[batch * args.origin_stride + 4], valid);
}

// `valid` says nothing of the lengths, which Sequence::valid does.
TEA_HOST_DEVICE SequencePair sequence_pair_of(const AttentionArguments& args, int64_t batch,
                                              const Sequence& q, const Sequence& kv, bool* valid) {
  return make_sequence_pair(args.mask, batch, q, kv, origin_of(args, batch, 2, valid),
                            origin_of(args, batch, 3, valid), shift_of(args, batch, valid));
}

// The origins that a run has: one, or one for each sequence.
TEA_HOST_DEVICE int64_t num_origins(const AttentionArguments& args) {
  return args.origin_stride ? args.batch : 1;
}
TEA_HOST_DEVICE bool is_origin_valid(const AttentionArguments& args, int64_t number) {
  bool valid = true;
  for (int i = 0; i < 4; ++i) origin_of(args, number, i, &valid);
  shift_of(args, number, &valid);
  return valid;
}

TEA_DEVICE void report_status(const AttentionArguments& args, int32_t bit) {
  if (args.status) atomicOr(args.status, bit);
}

// ALiBi's slope of a query head.
TEA_DEVICE float slope_of(const AttentionArguments& args, int64_t batch, int64_t head) {
  if (args.alibi == TEA_ALIBI_NONE) return 0;
  if (args.alibi == TEA_ALIBI_STANDARD) return static_cast<float>(alibi_slope(head, args.heads_q));
  return args.slopes[batch * args.slopes_stride + head];
}

// The logit of the additional term in the denominator; -infinity if there is none.
TEA_DEVICE float sink_of(const AttentionArguments& args, int64_t head) {
  if (args.softmax == TEA_SOFTMAX_LEARNABLE) return args.sink[head];
  return args.softmax == TEA_SOFTMAX_OFF_BY_ONE ? 0.0f : kMinusInfinity;
}

// Zero without dropout, because backward asks in either case.
TEA_DEVICE RngState rng_of(const AttentionArguments& args) {
  if (!args.rng) return {};
  return {static_cast<uint64_t>(args.rng[0]), static_cast<uint64_t>(args.rng[1])};
}

}  // namespace tea
