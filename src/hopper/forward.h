// The forward pass on sm_90a: what a launch needs, and which row of the table of kernels serves it.
// No header of CUDA is read here, so that the engine need not be compiled by nvcc.
#pragma once
#include <cstdint>

#include "math/lengths.h"
#include "math/mask.h"

namespace tea::hopper {

// A tensor of three indices and, except for what is one number a row, a contiguous head dimension.
// Strides in elements, any order, zero allowed for what is broadcast. A ragged tensor has no batch.
struct Strided {
  void* data;
  int64_t batch, head, row;
};

// How the sequences of one side lie. Lengths and starts are read when the kernel runs, and clamped.
enum class Form { kDense, kPadded, kRagged };
struct Sequences {
  Form form = Form::kDense;
  int32_t rows = 0;                     // of a dense side, else the most that a sequence may have
  int32_t tokens = 0;                   // rows of a ragged buffer
  const int32_t* cu_seqlens = nullptr;  // [batch + 1] unless dense
  const int32_t* offsets = nullptr;     // [batch + 1] of a ragged side with gaps, else null

  TEA_HOST_DEVICE Sequence at(int i) const {
    if (form == Form::kDense) return dense_sequence(rows);
    if (form == Form::kPadded) return padded_sequence(cu_seqlens, i, rows);
    return ragged_sequence(cu_seqlens, offsets, i, rows, tokens);
  }
};

enum class Sink { kNone, kZero, kTensor };

// What bends the scores or drops probabilities: only the general kernels know it.
struct General {
  const void* bias;  // null: none
  int64_t bias_batch, bias_head, bias_row, bias_col;
  bool bias_is_fp32, bias_before_scale;
  bool alibi;
  const float* slopes;  // null: the published ones
  int64_t slopes_batch;
  float softcap;             // 0: none
  float dropout;             // 0: none
  const int64_t* rng_state;  // {seed, offset}
};

// o = softmax(scale q k^T, masked) v as docs/semantics.md has it. Shapes: q [batch, heads, rows,
// dim], k [batch, heads_kv, rows, dim], v likewise with dim_v, o as q with dim_v; lse, max, sum_exp
// [batch, heads, rows], null where not wanted; heads is a multiple of heads_kv.
struct Forward {
  Strided q, k, v, o, lse, max, sum_exp;
  Sequences queries, keys;
  MaskRule mask;
  int64_t origin[4];
  const int64_t* origin_device;  // instead of origin, or null
  int32_t* status;               // or null
  Sink sink;
  const float* sinks;  // [heads], for Sink::kTensor
  void* counter;       // device memory for the scheduler: see needs_counter()
  bool is_fp16;        // of q, k, v and o; else bf16
  int32_t batch, heads, heads_kv, dim, dim_v;
  float scale;
  General general;
};

// The row of the table of kernels that serves these head dimensions, or -1. Dimensions between rows
// are filled up with zeros by the copy engine.
int forward_row(int dim, int dim_v);

// Whether tiles are so high that the last of a sequence often has rows for some consumers only. It
// is shorter then, and if tiles were dealt in turn, the same processors would always get it.
bool has_high_tiles(int dim, int dim_v);

// Tiles may differ in length, and are claimed from a counter: kClaimsBytes at a multiple of 8 that
// no other launch uses meanwhile. What they hold does not matter.
bool needs_counter(const Forward& f);
inline constexpr int kClaimsBytes = 16;

// Longer sequences than this are refused: rows and keys are counted in 32 bits.
inline constexpr int kMaxRows = 1 << 30;

// How a launch went: a cudaError_t, its text, and the call of CUDA that gave it or the argument
// that was refused.
struct Outcome {
  int code;  // 0: well
  const char *what, *text;
};

// Launches on a CUstream_st* of the device whose context is current, and allocates nothing. Fails
// without a launch if no row serves it, or if the copy engine cannot address a tensor: pointers and
// strides are multiples of 16 bytes, strides below 2^40.
Outcome forward(const Forward& f, void* stream);

}  // namespace tea::hopper
