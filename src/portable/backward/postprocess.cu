// After the main kernel: dQ from its fp32 sums.
#include "portable/backward/row_kernel.cuh"
#include "portable/backward/score_gradient.cuh"

namespace tea::portable {
namespace {

// Loads 16 dimensions of a row of DqBlock, which are in the order of accumulators: lane t of a quad
// has dimensions 2t, 2t + 1, 8 + 2t, 9 + 2t.
TEA_DEVICE void load_sums(float (&x)[16], const float* from) {
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const float4 four = reinterpret_cast<const float4*>(from)[t];
    x[2 * t] = four.x, x[2 * t + 1] = four.y;
    x[8 + 2 * t] = four.z, x[9 + 2 * t] = four.w;
  }
}

// Stores the first `count` of up to 16 elements.
template <int kDtype>
TEA_DEVICE void store_floats(const float (&x)[16], int count, const StridedTensor& rows,
                             int64_t element) {
  if constexpr (kDtype == kAnyType) {
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

// Returns the amax of the row, before the scale of FP8.
template <int kDtype>
TEA_DEVICE float postprocess_row(const RowParams& p, const SequencePair& seq,
                                 const RowPosition& at) {
  const AttentionArguments& args = p.work.args;
  const BackwardBuffers& buffers = p.work.buffers;
  const int64_t rows = args.queries.form == TEA_RAGGED ? seq.q.length : args.queries.max_seqlen;
  if (at.row >= rows) return 0;
  const Columns attending = attending_rows(seq);
  const bool attends = at.row >= attending.begin && at.row < attending.end;
  const int64_t first = first_entry(p.work, seq, at.head);
  const int length = static_cast<int>(seq.q.length);
  const int64_t element =
      first_element(args.dq, args.queries, seq.q, seq.batch, at.head) + at.row * args.dq.seq;
  const DqBlock block = dq_block(buffers, first, at.row / 16 * 16, length);
  const float factor = backward_scales(args).dq, scale = scalar_or_1(args.fp8.dq);
  float amax = 0;
  for (int d = at.lane * 16; d < args.dim_qk; d += static_cast<int>(p.lanes) * 16) {
    float x[16] = {};
    if (attends) load_sums(x, block.at(at.row % 16, d));
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      x[i] *= factor;
      if (d + i < args.dim_qk) amax = fmaxf(amax, fabsf(x[i]));
      x[i] *= scale;
    }
    store_floats<kDtype>(x, args.dim_qk - d, args.dq, element + d);
  }
  return amax;
}

template <int kDtype>
__global__ void __launch_bounds__(kRowThreads)
    postprocess_kernel(const __grid_constant__ RowParams p) {
  const RowPosition at = row_position(p);
  float amax = 0;
  for_each_sequence(p.work.args, [&](const SequencePair& seq) {
    amax = fmaxf(amax, postprocess_row<kDtype>(p, seq, at));
  });
  update_amax_by_warp(p.work.args.fp8.dq_amax, amax);
}

}  // namespace

void launch_postprocess(const BackwardArguments& work, cudaStream_t stream) {
  const int type = kernel_type({&work.args.dq});
  const auto kernel = type == TEA_BF16   ? postprocess_kernel<TEA_BF16>
                      : type == TEA_FP16 ? postprocess_kernel<TEA_FP16>
                                         : postprocess_kernel<kAnyType>;
  launch_rows("backward, postprocess", kernel, work, (work.args.dim_qk + 15) / 16, stream);
}

}  // namespace tea::portable
