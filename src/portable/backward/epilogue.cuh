// Epilogue of the main backward kernel: stores dK and dV through the shared memory of K and V.
#pragma once
#include <cstddef>

#include "portable/backward/score_gradient.cuh"
#include "portable/backward/store_gradient.cuh"
#include "portable/backward/work_tile.cuh"

namespace tea::portable {

template <BackwardConfig C>
struct BackwardEpilogue {
  using T = BackwardTraits<C>;
  using Grid = typename T::DkvGrid;
  using Accumulator = typename Grid::Accumulator;
  using Operand = typename T::Operand;

  const BackwardWorkTile<C>& tile;

  // Rounds a gradient to the operand type in shared memory; keys that no row attends to are zero.
  TEA_DEVICE void stage_plain(const Accumulator& x, const Operand& to, float factor) const {
    const int row = Grid::row(warp()), column = Grid::column(warp());
    const Columns& attended = tile.seq.attended;
#pragma unroll
    for (int m = 0; m < Grid::kMmaM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int r = row + 16 * m + 8 * half + lane() / 4;
        const bool any = tile.key + r >= attended.begin && tile.key + r < attended.end;
#pragma unroll
        for (int n = 0; n < Grid::kMmaN; ++n)
          store_pair(to, r, column + 8 * n + lane() % 4 * 2,
                     any ? x[m][n][2 * half] * factor : 0.0f,
                     any ? x[m][n][2 * half + 1] * factor : 0.0f);
      }
  }
  // Stores the rows that the tensor has, 16 bytes at a time.
  TEA_DEVICE void store_plain(const Operand& from, const GradientOutput& to, int64_t count) const {
    constexpr int kChunks = Operand::kChunks;
#pragma unroll
    for (int i = 0; i < T::kBlockN * kChunks / T::kThreads; ++i) {
      const int n = i * T::kThreads + static_cast<int>(threadIdx.x);
      const int r = n / kChunks, c = n % kChunks;
      if (tile.key + r >= count || c * 8 >= to.dim) continue;
      const int64_t at = to.head_element + (tile.key + r) * to.rows.seq + c * 8;
      *reinterpret_cast<uint4*>(static_cast<uint16_t*>(to.rows.data) + at) =
          load_shared_16(from.chunk(r, c));
    }
  }
  // Stores the rows element by element as `dtype`. The memory of K and V together holds them as
  // fp32.
  TEA_DEVICE void store_elements(const Accumulator& x, const GradientOutput& to, int32_t dtype,
                                 int64_t count) const {
    using Storage = typename T::SharedStorage;
    static_assert(offsetof(Storage, v) == sizeof tile.s.k);
    float(*const sums)[T::kDim] = reinterpret_cast<float(*)[T::kDim]>(tile.s.k);
    const int row = Grid::row(warp()), column = Grid::column(warp());
    __syncthreads();
#pragma unroll
    for (int m = 0; m < Grid::kMmaM; ++m)
#pragma unroll
      for (int n = 0; n < Grid::kMmaN; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          sums[row + 16 * m + accumulator_row(i)][column + accumulator_column(n, i)] = x[m][n][i];
    __syncthreads();
    store_gradient<T::kBlockN, T::kDim, T::kThreads>(sums, to, dtype, tile.key, count,
                                                     tile.seq.attended);
  }

  TEA_DEVICE void run(const Accumulator& dk, const Accumulator& dv) const {
    __syncthreads();  // every warp has read K and V
    const AttentionArguments& args = tile.p.work.args;
    const SequencePair& seq = tile.seq;
    const BackwardScales scales = backward_scales<!T::kGeneral>(args);
    const auto head_element = [&](const StridedTensor& to) {
      return first_element(to, args.keys, seq.kv, seq.batch, tile.kv_head);
    };
    const int64_t count = args.keys.form == TEA_RAGGED ? seq.kv.length : args.keys.max_seqlen;
    const GradientOutput to_dk = {
        args.dk,
        head_element(args.dk),
        0,
        args.dim_qk,
        scales.dk,
        scalar_or_1(args.fp8.dk),
        args.fp8.dk_amax,
    };
    const GradientOutput to_dv = {
        args.dv,          head_element(args.dv), 0, args.dim_v, scales.dv, scalar_or_1(args.fp8.dv),
        args.fp8.dv_amax,
    };
    if (T::kGeneral || args.dk.dtype == TEA_FP32) {  // dV has the same type
      // A constant in the plain kernels, which spill otherwise: see is_stored_by_plain().
      const int32_t dtype = T::kGeneral ? args.dk.dtype : +TEA_FP32;
      store_elements(dk, to_dk, dtype, count);
      store_elements(dv, to_dv, dtype, count);
    } else {
      const Operand keys{shared_address(tile.s.k)}, values{shared_address(tile.s.v)};
      stage_plain(dk, keys, to_dk.factor);
      stage_plain(dv, values, to_dv.factor);
      __syncthreads();
      store_plain(keys, to_dk, count);
      store_plain(values, to_dv, count);
    }
  }
};

}  // namespace tea::portable
