// The arguments of the backward kernels.
#pragma once
#include "gpu/arguments.h"

namespace tea::portable {

// The buffers in the workspace through which the kernels of a backward pass exchange data. Row i of
// a sequence is entry first + i of its head; `first` is the start of the sequence in a ragged
// buffer, otherwise batch * max_seqlen.
struct BackwardBuffers {
  float* lse2;    // [heads_q][rows]: LSE * log2(e); +infinity for rows that attend to no key
  float* delta;   // [heads_q][rows]: dO . O - dLSE
  float* dq;      // [heads_q][rows][width]: dQ before its scale, see DqBlock; null: not used
  int64_t rows;   // of all sequences
  int32_t width;  // of a row of dq: dim_qk, rounded up to a multiple of 16
};

struct BackwardArguments {
  AttentionArguments args;
  BackwardBuffers buffers;
  int64_t bias_batch;  // of dBias
};

// The parameters of the kernels with one tile per CTA.
struct BackwardParams {
  BackwardArguments work;
  unsigned tiles;  // of a sequence
  float scale_log2;
  int64_t first_cta = 0;  // of this launch
};

}  // namespace tea::portable
