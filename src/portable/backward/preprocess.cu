// Before the tile kernels: LSE and delta = dO . O - dLSE of every row, and zero sums of dQ.
#include "portable/backward/row_kernel.cuh"

namespace tea::portable {
namespace {

// Loads eight elements.
template <int kDtype>
TEA_DEVICE void load_floats(float (&x)[8], const StridedTensor& rows, int64_t element) {
  if constexpr (kDtype == kAnyType) {
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
TEA_DEVICE void preprocess_row(const RowParams& p, const SequencePair& seq, const RowPosition& at) {
  const AttentionArguments& args = p.work.args;
  const BackwardBuffers& buffers = p.work.buffers;
  const bool is_valid = at.row < seq.q.length;
  const Columns attending = attending_rows(seq);
  const bool attends = is_valid && at.row >= attending.begin && at.row < attending.end;
  const int64_t entry = first_entry(p.work, seq, at.head) + at.row;
  float delta = 0;
  if (attends) {
    const int64_t o =
        first_element(args.o, args.queries, seq.q, seq.batch, at.head) + at.row * args.o.seq;
    const int64_t dout =
        first_element(args.dout, args.queries, seq.q, seq.batch, at.head) + at.row * args.dout.seq;
    for (int d = at.lane * 8; d < args.dim_v; d += static_cast<int>(p.lanes) * 8) {
      float x[8], y[8];
      load_floats<kDtype>(x, args.o, o + d);
      load_floats<kDtype>(y, args.dout, dout + d);
#pragma unroll
      for (int i = 0; i < 8; ++i) delta = fmaf(x[i], y[i], delta);
    }
  }
  if (is_valid && buffers.dq)
    for (int d = at.lane * 4; d < buffers.width; d += static_cast<int>(p.lanes) * 4)
      *reinterpret_cast<float4*>(buffers.dq + entry * buffers.width + d) = {};
  for (unsigned d = p.lanes / 2; d > 0; d /= 2) delta += __shfl_xor_sync(0xffffffff, delta, d);
  if (!is_valid || at.lane != 0) return;
  const int64_t statistic =
      first_statistic(args, seq.q, seq.batch, at.head) + at.row * args.statistics.seq;
  const float lse = args.statistics.lse[statistic];
  delta *= scalar_or_1(args.fp8.o_inv) * scalar_or_1(args.fp8.dout_inv);
  if (args.statistics.dlse) delta -= args.statistics.dlse[statistic];
  buffers.lse2[entry] = lse == kMinusInfinity ? -kMinusInfinity : lse * kLog2E;
  buffers.delta[entry] = delta;
}

template <int kDtype>
__global__ void __launch_bounds__(kRowThreads, kDtype == kAnyType ? 4 : 6)
    preprocess_kernel(const __grid_constant__ RowParams p) {
  const RowPosition at = row_position(p);
  for_each_sequence(p.work.args,
                    [&](const SequencePair& seq) { preprocess_row<kDtype>(p, seq, at); });
}

}  // namespace

void launch_preprocess(const BackwardArguments& work, cudaStream_t stream) {
  const int type = kernel_type({&work.args.o, &work.args.dout});
  const auto kernel = type == TEA_BF16   ? preprocess_kernel<TEA_BF16>
                      : type == TEA_FP16 ? preprocess_kernel<TEA_FP16>
                                         : preprocess_kernel<kAnyType>;
  launch_rows("backward, preprocess", kernel, work, work.args.dim_v / 8, stream);
}

}  // namespace tea::portable
