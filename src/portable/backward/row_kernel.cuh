// Common parts of the kernels with one row per group of lanes: preprocess.cu and postprocess.cu.
#pragma once
#include <algorithm>
#include <initializer_list>

#include "gpu/launch.h"
#include "portable/backward/buffers.cuh"
#include "portable/backward/launch.h"
#include "portable/device/load_store.cuh"

namespace tea::portable {
namespace {

constexpr int kRowThreads = 256;

// `lanes` adjacent lanes, a power of two, have a row of a head.
struct RowParams {
  BackwardArguments work;
  unsigned lanes;
};
struct RowPosition {
  int row, head, lane;
};
TEA_DEVICE RowPosition row_position(const RowParams& p) {
  const unsigned heads = static_cast<unsigned>(p.work.args.heads_q);
  const unsigned n = blockIdx.x * (kRowThreads / p.lanes) + threadIdx.x / p.lanes;
  return {static_cast<int>(n / heads), static_cast<int>(n % heads),
          static_cast<int>(threadIdx.x & (p.lanes - 1))};
}

// Calls body(sequence pair) for each sequence of the CTA. One thread computes the pair for all:
// computed by every thread, it would take as long as a row.
template <class Body>
TEA_DEVICE void for_each_sequence(const AttentionArguments& args, Body&& body) {
  __shared__ SequencePair seq;
  for (int64_t b = blockIdx.y; b < args.batch; b += gridDim.y) {
    __syncthreads();
    if (threadIdx.x == 0) seq = sequence_pair_of(args, b);
    __syncthreads();
    body(seq);
  }
}

// The kernels exist for each 16-bit type with vectorizable tensors, and for any tensors.
constexpr int kAnyType = TEA_DTYPE_DEFAULT;

// The type of the kernel that serves all of these tensors.
int kernel_type(std::initializer_list<const StridedTensor*> tensors) {
  const int32_t type = (*tensors.begin())->dtype;
  const auto fits = [type](const StridedTensor* rows) {
    return rows->dtype == type && rows->is_vectorizable;
  };
  const bool is_16_bit = type == TEA_FP16 || type == TEA_BF16;
  return is_16_bit && std::all_of(tensors.begin(), tensors.end(), fits) ? type : kAnyType;
}

// items: pieces of work of a row, one for each lane.
void launch_rows(const char* name, void (*kernel)(RowParams), const BackwardArguments& work,
                 int items, cudaStream_t stream) {
  const AttentionArguments& args = work.args;
  if (args.batch == 0 || args.queries.max_seqlen == 0) return;
  unsigned lanes = 1;
  while (lanes < static_cast<unsigned>(items) && lanes < 32) lanes *= 2;
  const int64_t rows = args.queries.max_seqlen * args.heads_q, per_cta = kRowThreads / lanes;
  const dim3 grid{static_cast<unsigned>((rows + per_cta - 1) / per_cta),
                  static_cast<unsigned>(std::min<int64_t>(args.batch, 65535))};
  launch({name, grid, kRowThreads}, kernel, stream, RowParams{work, lanes});
}

}  // namespace
}  // namespace tea::portable
