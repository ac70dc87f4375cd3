// What backward does row by row: before the tiles, LSE and delta = dO . O - dLSE, and dQ's sums
// cleared; after them, dQ from its sums, and the gradient of sinks.
#include <algorithm>
#include <initializer_list>

#include "gpu/launch.h"
#include "portable/backward_passes.h"
#include "portable/device/gradient.cuh"

namespace tea::portable {
namespace {

constexpr int kThreads = 256, kSinkThreads = 1024;

// A team of neighbouring lanes, a power of two, has a row of a head.
struct Parameters {
  BackwardArguments work;
  unsigned team;
};
struct Place {
  int row, head, member;
};
TEA_DEVICE Place place_of(const Parameters& p) {
  const unsigned heads = static_cast<unsigned>(p.work.args.heads_q);
  const unsigned n = blockIdx.x * (kThreads / p.team) + threadIdx.x / p.team;
  return {static_cast<int>(n / heads), static_cast<int>(n % heads),
          static_cast<int>(threadIdx.x & (p.team - 1))};
}

// Calls work(item) for each sequence of the block. One thread finds it for all: on rows this short
// that would cost each of them as much as the row does.
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

// The kernels below are made for a 16-bit type in wide pieces, and for anything.
constexpr int kAny = TEA_DTYPE_DEFAULT;

// Eight elements from `element` on.
template <int kDtype>
TEA_DEVICE void load_floats(float (&x)[8], const StridedTensor& rows, int64_t element) {
  if constexpr (kDtype == kAny) {
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      const float one = load_float(rows.data, rows.dtype, element + i);
#pragma unroll
      for (int j = 0; j < 8; ++j)  // an index that is not constant would put x into memory
        if (j == i) x[j] = one;
    }
  } else {
    const uint4 bits =
        *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(rows.data) + element);
    const uint32_t pair[4] = {bits.x, bits.y, bits.z, bits.w};
    constexpr bool kHalf = kDtype == TEA_FP16;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] =
          kHalf ? half_to_float(static_cast<uint16_t>(pair[i])) : __uint_as_float(pair[i] << 16);
      x[2 * i + 1] = kHalf ? half_to_float(static_cast<uint16_t>(pair[i] >> 16))
                           : __uint_as_float(pair[i] & 0xFFFF0000);
    }
  }
}

template <int kDtype>
TEA_DEVICE void prepare_row(const Parameters& p, const SequencePair& seq, const Place& at) {
  const AttentionArguments& args = p.work.args;
  const RowSums& sums = p.work.sums;
  const bool inside = at.row < seq.q.length;
  const Columns seeing = seeing_rows(seq);
  const bool sees = inside && at.row >= seeing.begin && at.row < seeing.end;
  const int64_t entry = first_entry(p.work, seq, at.head) + at.row;
  float delta = 0;
  if (sees) {
    const int64_t o =
        first_element(args.o, args.queries, seq.q, seq.batch, at.head) + at.row * args.o.seq;
    const int64_t dout =
        first_element(args.dout, args.queries, seq.q, seq.batch, at.head) + at.row * args.dout.seq;
    for (int d = at.member * 8; d < args.dim_v; d += static_cast<int>(p.team) * 8) {
      float x[8], y[8];
      load_floats<kDtype>(x, args.o, o + d);
      load_floats<kDtype>(y, args.dout, dout + d);
#pragma unroll
      for (int i = 0; i < 8; ++i) delta = fmaf(x[i], y[i], delta);
    }
  }
  if (inside && sums.dq)
    for (int d = at.member * 4; d < sums.width; d += static_cast<int>(p.team) * 4)
      *reinterpret_cast<float4*>(sums.dq + entry * sums.width + d) = {};
  for (unsigned d = p.team / 2; d > 0; d /= 2) delta += __shfl_xor_sync(0xffffffff, delta, d);
  if (!inside || at.member != 0) return;
  const int64_t per_row =
      first_per_row(args, seq.q, seq.batch, at.head) + at.row * args.statistics.seq;
  const float lse = args.statistics.lse[per_row];
  delta *= scalar(args.fp8.o_inv) * scalar(args.fp8.dout_inv);
  if (args.statistics.dlse) delta -= args.statistics.dlse[per_row];
  sums.lse2[entry] = lse == kMinusInfinity ? -kMinusInfinity : lse * kLog2E;
  sums.delta[entry] = delta;
}

template <int kDtype>
__global__ void __launch_bounds__(kThreads, kDtype == kAny ? 4 : 6)
    prepare_entry(const __grid_constant__ Parameters p) {
  const Place at = place_of(p);
  for_each_sequence(p.work.args, [&](const SequencePair& seq) { prepare_row<kDtype>(p, seq, at); });
}

// dQ's sums stand 16 dimensions at a time as accumulators hold them: the lane t of a quad has
// dimensions 2t, 2t + 1, 8 + 2t, 9 + 2t.
TEA_DEVICE void load_sums(float (&x)[16], const float* from) {
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const float4 four = reinterpret_cast<const float4*>(from)[t];
    x[2 * t] = four.x, x[2 * t + 1] = four.y;
    x[8 + 2 * t] = four.z, x[9 + 2 * t] = four.w;
  }
}

// Up to 16 elements from `element` on.
template <int kDtype>
TEA_DEVICE void store_floats(const float (&x)[16], int count, const StridedTensor& rows,
                             int64_t element) {
  if constexpr (kDtype == kAny) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (i < count) store_float(rows.data, rows.dtype, element + i, x[i]);
  } else {
    uint32_t pair[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) pair[i] = pack<kDtype>(x[2 * i], x[2 * i + 1]);
    auto* to = reinterpret_cast<uint4*>(static_cast<uint16_t*>(rows.data) + element);
    to[0] = {pair[0], pair[1], pair[2], pair[3]};
    if (count > 8) to[1] = {pair[4], pair[5], pair[6], pair[7]};
  }
}

// Returns the largest magnitude before the output's scale.
template <int kDtype>
TEA_DEVICE float finish_row(const Parameters& p, const SequencePair& seq, const Place& at) {
  const AttentionArguments& args = p.work.args;
  const RowSums& sums = p.work.sums;
  const int64_t rows = args.queries.form == TEA_RAGGED ? seq.q.length : args.queries.max_seqlen;
  if (at.row >= rows) return 0;
  const Columns seeing = seeing_rows(seq);
  const bool sees = at.row >= seeing.begin && at.row < seeing.end;
  const int64_t first = first_entry(p.work, seq, at.head);
  const int length = static_cast<int>(seq.q.length);
  const int64_t element =
      first_element(args.dq, args.queries, seq.q, seq.batch, at.head) + at.row * args.dq.seq;
  const DqBlock block = dq_block(sums, first, at.row / 16 * 16, length);
  const float factor = factors_of(args).dq, scale = scalar(args.fp8.dq);
  float largest = 0;
  for (int d = at.member * 16; d < args.dim_qk; d += static_cast<int>(p.team) * 16) {
    float x[16] = {};
    if (sees) load_sums(x, block.at(at.row % 16, d));
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      x[i] *= factor;
      if (d + i < args.dim_qk) largest = fmaxf(largest, fabsf(x[i]));
      x[i] *= scale;
    }
    store_floats<kDtype>(x, args.dim_qk - d, args.dq, element + d);
  }
  return largest;
}

template <int kDtype>
__global__ void __launch_bounds__(kThreads) finish_entry(const __grid_constant__ Parameters p) {
  const Place at = place_of(p);
  float largest = 0;
  for_each_sequence(p.work.args, [&](const SequencePair& seq) {
    largest = fmaxf(largest, finish_row<kDtype>(p, seq, at));
  });
  raise_by_warp(p.work.args.fp8.dq_amax, largest);
}

// One block for each head; rows are added up in an order that only the sizes decide. In double
// precision, since a sink far below its row's scores, too small for a float to hold, may meet a
// delta as far above 1.
__global__ void __launch_bounds__(kSinkThreads)
    dsink_entry(const __grid_constant__ BackwardArguments work) {
  __shared__ double share[kSinkThreads];
  const AttentionArguments& args = work.args;
  const int64_t head = blockIdx.x;
  const double sink = sink_of(args, head);
  double sum = 0;
  for (int64_t b = 0; b < args.batch; ++b) {
    const SequencePair seq = sequence_pair_of(args, b);
    const float* const delta = work.sums.delta + first_entry(work, seq, head);
    const float* const lses = args.statistics.lse + first_per_row(args, seq.q, b, head);
    for (int64_t i = threadIdx.x; i < seq.q.length; i += kSinkThreads) {
      const double lse = lses[i * args.statistics.seq];
      if (lse != kMinusInfinity) sum -= exp(sink - lse) * delta[i];
    }
  }
  share[threadIdx.x] = sum;
  for (int n = kSinkThreads / 2; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n) share[threadIdx.x] += share[threadIdx.x + n];
  }
  if (threadIdx.x == 0) args.dsink[head] = static_cast<float>(share[0]);
}

void launch_rows(const char* name, void (*kernel)(Parameters), const BackwardArguments& work,
                 int pieces, cudaStream_t stream) {
  const AttentionArguments& args = work.args;
  if (args.batch == 0 || args.queries.max_seqlen == 0) return;
  unsigned team = 1;
  while (team < static_cast<unsigned>(pieces) && team < 32) team *= 2;
  const int64_t rows = args.queries.max_seqlen * args.heads_q, per_block = kThreads / team;
  const dim3 grid{static_cast<unsigned>((rows + per_block - 1) / per_block),
                  static_cast<unsigned>(std::min<int64_t>(args.batch, 65535))};
  launch({name, grid, kThreads}, kernel, stream, Parameters{work, team});
}

// The type for which a kernel is made that serves all these tensors.
int kernel_type(std::initializer_list<const StridedTensor*> all) {
  const int32_t type = (*all.begin())->dtype;
  const auto fits = [type](const StridedTensor* rows) {
    return rows->dtype == type && rows->is_vectorizable;
  };
  const bool half = type == TEA_FP16 || type == TEA_BF16;
  return half && std::all_of(all.begin(), all.end(), fits) ? type : kAny;
}

}  // namespace

void prepare_rows(const BackwardArguments& work, cudaStream_t stream) {
  const int type = kernel_type({&work.args.o, &work.args.dout});
  const auto kernel = type == TEA_BF16   ? prepare_entry<TEA_BF16>
                      : type == TEA_FP16 ? prepare_entry<TEA_FP16>
                                         : prepare_entry<kAny>;
  launch_rows("backward, before the tiles", kernel, work, work.args.dim_v / 8, stream);
}

void finish_dq(const BackwardArguments& work, cudaStream_t stream) {
  const int type = kernel_type({&work.args.dq});
  const auto kernel = type == TEA_BF16   ? finish_entry<TEA_BF16>
                      : type == TEA_FP16 ? finish_entry<TEA_FP16>
                                         : finish_entry<kAny>;
  launch_rows("backward, dQ after the tiles", kernel, work, (work.args.dim_qk + 15) / 16, stream);
}

void sum_dsink(const BackwardArguments& work, cudaStream_t stream) {
  launch({"backward, dsink", static_cast<unsigned>(work.args.heads_q), kSinkThreads}, dsink_entry,
         stream, work);
}

}  // namespace tea::portable
