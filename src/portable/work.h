// Work: what a kernel of this engine receives, by value: every pointer, stride, size and rule of
// one execution, built from Problem and Run in one place for forward and backward alike.
#pragma once
#include <cstdint>

#include "core/tensors.h"
#include "portable/item.h"

namespace tea::portable {

// A tensor of rows. Strides in elements; the head dimension is contiguous.
struct Rows {
  void* data;
  int64_t batch, seq, head;
  int32_t dtype;
  int32_t wide;  // 1: every run of eight elements can be read in pieces of min(16, its size) bytes
};

// One side of the problem: where its sequences lie.
struct Side {
  const int32_t *cu_seqlens, *offsets;  // null where the form has none
  int64_t capacity;                     // the most rows that a sequence may have
  int64_t tokens;                       // rows of a ragged buffer
  int32_t form;
  int32_t page_size;  // zero unless paged
};

struct PageTable {
  const int32_t* entries;  // null unless paged
  int64_t stride, pages;
};

// LSE and what has its shape; null where absent.
struct PerRow {
  float *lse, *max, *sum_exp;
  const float* dlse;
  int64_t batch, seq, head;
};

struct Bias {
  const void* data;
  void* gradient;
  tea_bias_strides stride, gradient_stride;
  int32_t dtype;
  int32_t kind;       // tea_bias
  int32_t broadcast;  // bits TEA_BROADCAST_*
};

// Scalars of FP8 in device memory; null: 1, or not recorded. What a missing one falls back to is
// resolved here.
struct Scales {
  const float *q_inv, *k_inv, *v_inv, *s, *s_inv, *o, *o_inv, *dout_inv, *dp, *dp_inv, *dq, *dk,
      *dv;
  float *s_amax, *o_amax, *dp_amax, *dq_amax, *dk_amax, *dv_amax;
};

struct Work {
  Rows q, k, v, o, dout, dq, dk, dv;
  Side queries, keys;
  PageTable table_k, table_v;
  PerRow per_row;
  Bias bias;
  Scales scales;
  MaskRule mask;
  Item every;     // where the sequences are equal, all of them but for `b`
  int32_t equal;  // 1: they are, and the host knows it

  const float *sink, *slopes;
  float* dsink;
  int64_t slopes_stride;
  const int64_t* rng;  // {seed, offset}; null: no dropout
  int64_t origin[4];
  const int64_t* origin_device;  // instead of `origin`, or null
  int32_t* status;
  void* workspace;

  int64_t batch;  // sequences; zero where a dense batch has no rows
  int32_t heads_q, heads_kv, dim_qk, dim_v;
  int32_t alibi, softmax;  // tea_alibi, tea_softmax
  uint32_t drop_below;     // a probability is kept iff its uniform is at least this
  float keep_factor;       // 1 / (1 - dropout)
  float scale, softcap;    // softcap 0: none
  int32_t dp_dtype;        // of dS before the second product: an fp8 type, or that of dO
};

Work make_work(const Problem& problem, const Run& run);

// Whether scores go straight from scale to mask: no bias, ALiBi, soft cap or dropout.
bool has_plain_scores(const Work& work);

}  // namespace tea::portable
