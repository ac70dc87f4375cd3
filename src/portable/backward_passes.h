// The passes of a backward run that are not the fast one of backward.cu, and what all of them
// share: a Work and the sums that the workspace holds. Every function launches on the stream and
// returns.
#pragma once
#include <cuda_runtime.h>

#include <initializer_list>

#include "core/device.h"
#include "gpu/arguments.h"
#include "math/load_store.h"

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

struct BackwardArguments {
  AttentionArguments args;
  RowSums sums;
  int64_t bias_batch;  // of dbias
};

// backward_rows.cu: LSE and delta of every row, and dq cleared; dQ from dq; the gradient of sinks.
void prepare_rows(const BackwardArguments& work, cudaStream_t stream);
void finish_dq(const BackwardArguments& work, cudaStream_t stream);
void sum_dsink(const BackwardArguments& work, cudaStream_t stream);

// backward_queries.cu: dQ without atomics. False where it has no kernel that fits.
bool queries_alone(const BackwardArguments& work, const Device& device, cudaStream_t stream);

// backward_wide.cu: in pieces of the head dimensions, so that any fit, and without atomics.
void wide_keys(const BackwardArguments& work, cudaStream_t stream);     // dK, dV
void wide_queries(const BackwardArguments& work, cudaStream_t stream);  // dQ
void wide_bias(const BackwardArguments& work, cudaStream_t stream);     // dBias

// The type in which operands lie in tiles: the inputs' own; in fp8 the type of dO, so that it and
// the codes are both exact there.
inline int32_t tile_type(const AttentionArguments& args) {
  if (!is_fp8(args.q.dtype)) return args.q.dtype;
  return is_fp8(args.dout.dtype) ? +TEA_FP16 : args.dout.dtype;
}

// Whether the kernels without the general rules serve, which copy 16 bytes of these tensors at
// once.
inline bool is_plain(const AttentionArguments& args,
                     std::initializer_list<const StridedTensor*> tensors) {
  bool wide = true;
  for (const StridedTensor* rows : tensors) wide &= rows->is_vectorizable != 0;
  return !has_score_mod(args) && !args.has_dropout && args.scale > 0 && wide &&
         tile_type(args) == args.q.dtype;
}

}  // namespace tea::portable
