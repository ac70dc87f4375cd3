// The arguments of attention kernels: every pointer, stride, size and rule of one execution. One
// function builds them from Problem and Run for both GPU engines, forward and backward. No CUDA
// header is needed.
#pragma once
#include <cstdint>

#include "core/tensors.h"
#include "gpu/sequence_pair.h"

namespace tea {

// A tensor indexed by batch, sequence position and head, with a contiguous head dimension. Strides
// are in elements; a ragged tensor has no batch dimension.
struct StridedTensor {
  void* data;
  int64_t batch, seq, head;
  int32_t dtype;  // tea_dtype
  // 1: every run of eight elements can be accessed in pieces of min(16, its size) bytes.
  int32_t is_vectorizable;
};

// How the sequences of Q, or of K and V, are laid out. Lengths and offsets are read and clamped
// when the kernel runs.
struct SequenceLayout {
  const int32_t *cu_seqlens, *offsets;  // null where the form has none
  int64_t max_seqlen;                   // the length of every sequence of a dense tensor
  int64_t tokens;                       // rows of a ragged buffer
  int32_t form;                         // tea_form
  int32_t page_size;                    // 0 unless paged
};

struct PageTable {
  const int32_t* entries;  // null unless paged
  int64_t stride, pages;
};

// LSE and the other tensors with one element per row and head; null where absent.
struct RowStatistics {
  float *lse, *max, *sum_exp;
  const float* dlse;
  int64_t batch, seq, head;  // strides of all of them
};

struct BiasArguments {
  const void* data;
  void* gradient;
  tea_bias_strides stride, gradient_stride;
  int32_t dtype;
  int32_t kind;       // tea_bias
  int32_t broadcast;  // bits TEA_BROADCAST_*
};

// The scalars of FP8 in device memory. Null: 1, or not recorded. Where the caller gives no scale
// for K, V, dK or dV, the pointer is that of Q or dQ. With K and V alone in FP8 only k_inv and
// v_inv are given, and kv head h has number h * kv_stride of each.
struct Fp8Scales {
  const float *q_inv, *k_inv, *v_inv, *s, *s_inv, *o, *o_inv, *dout_inv, *dp, *dp_inv, *dq, *dk,
      *dv;
  float *s_amax, *o_amax, *dp_amax, *dq_amax, *dk_amax, *dv_amax;
  int64_t kv_stride;
};

struct AttentionArguments {
  StridedTensor q, k, v, o, dout, dq, dk, dv;
  SequenceLayout queries, keys;
  PageTable page_table_k, page_table_v;
  RowStatistics statistics;
  BiasArguments bias;
  Fp8Scales fp8;
  MaskRule mask;
  SequencePair uniform_pair;  // every batch entry, if is_uniform, except for its `batch`
  int32_t is_uniform;         // 1: all sequences have the same lengths, which the host knows

  const float *sink, *slopes;
  float* dsink;
  int64_t slopes_stride;
  const int64_t* rng;  // {seed, offset}; null: no dropout
  int64_t origin[4], shift;
  const int64_t* origin_device;  // used instead of `origin` unless null
  // From one sequence's origin_device to the next, whose fifth number is used instead of `shift`;
  // 0: all sequences have the same origin.
  int64_t origin_stride;
  int32_t* status;
  void* workspace;

  int64_t batch;  // 0 where dense Q, K and V have no rows
  int32_t heads_q, heads_kv, dim_qk, dim_v;
  int32_t alibi, softmax;  // tea_alibi, tea_softmax
  int32_t has_dropout;
  uint32_t dropout_threshold;  // an element of P is kept iff its uniform is at least this
  float keep_factor;           // 1 / (1 - dropout)
  float scale, softcap;        // softcap 0: none
  int32_t batch_invariant;     // as in tea_problem
  int32_t max_ctas;            // as in tea_problem
  int32_t accumulate;          // bits TEA_ACCUMULATE_*
  int32_t dp_dtype;            // of dS in dQ = dS K and dK = dS^T Q: an FP8 type, or that of dO
};

// Pointers that `run` does not have are null.
AttentionArguments make_arguments(const Problem& problem, const Run& run);

// How many CTAs a kernel has at a time where `most` have room.
inline int64_t limited_ctas(const AttentionArguments& args, int64_t most) {
  return args.max_ctas && args.max_ctas < most ? args.max_ctas : most;
}

// Bias, soft cap and ALiBi change scores between scale and mask.
TEA_HOST_DEVICE bool has_score_mod(const AttentionArguments& args) {
  return args.bias.kind || args.softcap > 0 || args.alibi;
}

}  // namespace tea
