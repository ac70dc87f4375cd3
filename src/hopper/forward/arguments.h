// The arguments of a forward launch. No CUDA header is included here, so that the engine can be
// compiled without nvcc.
#pragma once
#include <cstdint>

#include "math/lengths.h"
#include "math/mask.h"

namespace tea::hopper {

// Longer sequences are refused, so that rows and keys can be counted in 32 bits.
inline constexpr int kMaxSeqlen = 1 << 30;

// A tensor indexed by batch, head and sequence position, with a contiguous head dimension unless it
// has one element per row. Strides are in elements, in any order, and may be zero. A ragged tensor
// has no batch dimension.
struct StridedTensor {
  void* data;
  int64_t batch, head, seq;
};

// How the sequences of Q, or of K and V, are laid out. Lengths and offsets are read and clamped
// when the kernel runs.
enum class Form { kDense, kPadded, kRagged };
struct SequenceLayout {
  Form form = Form::kDense;
  int32_t max_seqlen = 0;               // the length of every sequence of a dense tensor
  int32_t tokens = 0;                   // rows of a ragged buffer
  const int32_t* cu_seqlens = nullptr;  // [batch + 1] unless dense
  const int32_t* offsets = nullptr;     // [batch + 1] of a ragged tensor with gaps, else null

  TEA_HOST_DEVICE Sequence at(int i) const {
    if (form == Form::kDense) return dense_sequence(max_seqlen);
    if (form == Form::kPadded) return padded_sequence(cu_seqlens, i, max_seqlen);
    return ragged_sequence(cu_seqlens, offsets, i, max_seqlen, tokens);
  }
};

enum class Sink { kNone, kZero, kTensor };

// Score modifications and dropout.
struct ScoreModArguments {
  const void* bias;  // null: none
  int64_t bias_batch, bias_head, bias_row, bias_col;
  bool bias_is_fp32, bias_before_scale;
  bool alibi;
  const float* slopes;  // null: the published slopes
  int64_t slopes_batch;
  float softcap;             // 0: none
  float dropout;             // 0: none
  const int64_t* rng_state;  // {seed, offset}
};

// o = softmax(scale q k^T, masked) v with the semantics of docs/semantics.md. Shapes: q [batch,
// heads, seq, dim], k [batch, heads_kv, seq, dim], v the same with dim_v, o the same as q with
// dim_v; lse, max and sum_exp [batch, heads, seq], null where not requested. `heads` is a multiple
// of `heads_kv`.
struct ForwardArguments {
  StridedTensor q, k, v, o, lse, max, sum_exp;
  SequenceLayout queries, keys;
  MaskRule mask;
  int64_t origin[4];
  const int64_t* origin_device;  // used instead of `origin` unless null
  int32_t* status;               // may be null
  Sink sink;
  const float* sinks;  // [heads], for Sink::kTensor
  void* counter;       // memory of the tile counter: see needs_tile_counter()
  bool is_fp16;        // of q, k, v and o; otherwise bf16
  int32_t batch, heads, heads_kv, dim, dim_v;
  float scale;
  ScoreModArguments score_mod;
};

}  // namespace tea::hopper
