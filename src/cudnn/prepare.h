// Kernels before and after cuDNN's graph: conversion of lengths, of the starts of ragged sequences
// (in elements) and of page tables (clamped), and clearing of rows that cuDNN does not write.
#pragma once
#include <cstdint>

#include "math/mask.h"

namespace tea::cudnn {

// One side of the problem.
struct Side {
  const int32_t *cu_seqlens, *offsets;  // NULL where the form has none
  int64_t capacity, tokens;             // rows of a sequence, of a ragged buffer
  int32_t form;
};

// The starts of a ragged tensor: those of its side's sequences, times its stride of a token.
struct Starts {
  int64_t* out;  // [graph_batch + 1]; NULL: not wanted
  int64_t stride;
};
inline constexpr int kMostStarts = 5;  // tensors of a side

struct PrepareSide {
  Side side;
  int32_t* lengths;  // [graph_batch]; NULL: not wanted
  Starts starts[kMostStarts];
};

inline constexpr int kScalarStep = 64;  // numbers: a piece of the workspace

struct PrepareTable {
  const int32_t* in;  // NULL: not paged
  int32_t* out;       // [graph_batch, columns]
  int64_t stride, pages;
};

// Copies numbers, zero for minus infinity: exp(x - LSE) of a masked x is then zero, not NaN.
struct Finite {
  const float* in;
  float* out;
  int64_t count;  // 0: none
};

struct Prepare {
  PrepareSide q, kv;
  PrepareTable k_table, v_table;
  int64_t given_columns, columns;  // of a sequence: in the caller's tables, in the graph's
  int32_t page_size;
  float* zero_sink;  // [heads]; NULL: none
  float* scalars;    // of fp8: 1 and zeros, kScalarStep apart; NULL: none
  int32_t heads, zeros;
  int64_t batch, graph_batch;  // the sequences between are empty
  Finite lse;
  int32_t* status;
};
void prepare(const Prepare& work, void* stream);

// Each amax becomes the maximum of itself and of this run's value, ignoring NaN.
inline constexpr int kMostRaised = 4;
struct Raise {
  const float* from[kMostRaised];
  float* to[kMostRaised];  // NULL: not recorded; two may be the same
};
void raise(const Raise& work, void* stream);

// Rows of MAX and SUM_EXP. cuDNN's MAX passes over NaN, its SUM_EXP does not: so MAX gets it from
// there. And LSE is made of both.
struct Finish {
  float* max;
  const float* sum_exp;
  float* lse;                // NULL: not wanted
  int64_t batch, seq, head;  // strides in elements
  int64_t batches, rows, heads;
};
void finish(const Finish& work, void* stream);

// A tensor of rows of heads.
struct Cleared {
  void* data;                 // NULL: none
  int64_t batch, seq, head;   // strides in elements
  int32_t heads, dim, bytes;  // of an element: 1, 2 or 4
  float value;                // written; of 1 and 2 bytes: 0
  const float* sink;          // [heads], written to rows that only see the sink; NULL: `value` is
};
inline constexpr int kMostCleared = 4;

struct Clear {
  Side side, other;  // of the rows, and of what they attend to or are attended by
  bool keys;         // the rows are keys
  Cleared tensor[kMostCleared];
  MaskRule mask;
  int64_t batch;
};
// Rows past the end of their sequence, tokens of no sequence, rows that nothing attends to or
// that attend to nothing. Of one side, or of both (`keys` may be NULL).
void clear(const Clear& work, const Clear* keys, void* stream);

}  // namespace tea::cudnn
