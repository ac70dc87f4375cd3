// The passes of a backward run that are not the fast one of backward.cu, and what all of them
// share: a Work and the sums that the workspace holds. Every function launches on the stream and
// returns.
#pragma once
#include <cuda_runtime.h>

#include <initializer_list>

#include "core/device.h"
#include "math/load_store.h"
#include "portable/work.h"

namespace tea::portable {

// Row i of a sequence is entry first + i of its head, first being where the sequence starts among
// the tokens of a ragged buffer, else batch * capacity.
struct RowSums {
  float* lse2;    // [heads_q][rows]: LSE in powers of two; +infinity where nothing is attended
  float* delta;   // [heads_q][rows]: dO . O - dLSE
  float* dq;      // [heads_q][rows][width]: dQ before its scale, as dq_block() says; null: unused
  int64_t rows;   // over all sequences
  int32_t width;  // of a row of dq: dim_qk, up to a multiple of 16
};

struct BackwardWork {
  Work w;
  RowSums sums;
  int64_t bias_batch;  // of dbias
};

// backward_rows.cu: LSE and delta of every row, and dq cleared; dQ from dq; the gradient of sinks.
void prepare_rows(const BackwardWork& work, cudaStream_t stream);
void finish_dq(const BackwardWork& work, cudaStream_t stream);
void sum_dsink(const BackwardWork& work, cudaStream_t stream);

// backward_queries.cu: dQ without atomics. False where it has no kernel that fits.
bool queries_alone(const BackwardWork& work, const Device& device, cudaStream_t stream);

// backward_wide.cu: in pieces of the head dimensions, so that any fit, and without atomics.
void wide_keys(const BackwardWork& work, cudaStream_t stream);     // dK, dV
void wide_queries(const BackwardWork& work, cudaStream_t stream);  // dQ
void wide_bias(const BackwardWork& work, cudaStream_t stream);     // dBias

// The type in which operands lie in tiles: the inputs' own; in fp8 the type of dO, so that it and
// the codes are both exact there.
inline int32_t tile_type(const Work& w) {
  if (!is_fp8(w.q.dtype)) return w.q.dtype;
  return is_fp8(w.dout.dtype) ? +TEA_FP16 : w.dout.dtype;
}

// Whether the kernels without the general rules serve, which copy 16 bytes of these tensors at
// once.
inline bool is_plain(const Work& w, std::initializer_list<const Rows*> tensors) {
  bool wide = true;
  for (const Rows* rows : tensors) wide &= rows->wide != 0;
  return has_plain_scores(w) && w.scale > 0 && wide && tile_type(w) == w.q.dtype;
}

}  // namespace tea::portable
