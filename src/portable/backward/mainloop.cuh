// The loop of the main backward kernel over query tiles: dV += P^T dO, dK += dS^T Q, and dQ += dS K
// by atomics in global memory.
#pragma once
#include "portable/backward/gradients.cuh"

namespace tea::portable {

template <BackwardConfig C>
struct BackwardMainloop {
  using T = BackwardTraits<C>;
  using Iterator = QueryTileIterator<T::kBlockM>;
  using DqGrid = typename T::DqGrid;
  using DkvGrid = typename T::DkvGrid;
  using DqAccumulator = typename DqGrid::Accumulator;
  using DkvAccumulator = typename DkvGrid::Accumulator;

  const BackwardWorkTile<C>& tile;
  const BackwardLoader<C>& loader;

  // Adds a warp's part of dQ to the sums in global memory. kWhole: all of its rows attend to the
  // key block, and the sums have all of its dimensions.
  template <bool kWhole>
  TEA_DEVICE void add_to_sums(const Iterator& query, const DqAccumulator& dq, int row, int column,
                              int lane) const {
    const BackwardBuffers& buffers = tile.p.work.buffers;
    const int64_t first = first_entry(tile.p.work, tile.seq, query.head);
    const int length = static_cast<int>(tile.seq.q.length);
#pragma unroll
    for (int m = 0; m < DqGrid::kMmaM; ++m) {
      const int block_row = query.first + row + 16 * m;
      const DqBlock block = dq_block(buffers, first, block_row, length);
      float* to = block.at(lane / 4, column) + lane % 4 * 4;
#pragma unroll
      for (int half = 0; half < 2; ++half, to += 8 * block.row) {
        const int r = block_row + 8 * half + lane / 4;
        const bool attends = r >= tile.begin && r < tile.end;
#pragma unroll
        for (int n = 0; n < DqGrid::kMmaN; n += 2)
          if (kWhole || (attends && column + 8 * n < buffers.width))
            red_add_4(to + n / 2 * block.dims, dq[m][n][2 * half], dq[m][n][2 * half + 1],
                      dq[m][n + 1][2 * half], dq[m][n + 1][2 * half + 1]);
      }
    }
  }
  TEA_DEVICE void add_dq(const Iterator& query, int thread) const {
    const int row = DqGrid::row(thread / 32), column = DqGrid::column(thread / 32);
    DqAccumulator dq = {};
    gemm<T::kDtype, T::kBlockN / 16, Major::kK, Major::kMn>(
        dq, typename T::ScoreOperand{shared_address(tile.s.ds)}, row,
        typename T::Operand{shared_address(tile.s.k)}, column);
    const int first = query.first + row;
    if (first >= tile.begin && first + DqGrid::kWarpRows <= tile.end &&
        column + DqGrid::kWarpColumns <= tile.p.work.buffers.width)
      add_to_sums<true>(query, dq, row, column, thread % 32);
    else
      add_to_sums<false>(query, dq, row, column, thread % 32);
  }

  // Computes dk and dv, and returns the amax of dS, for FP8.
  TEA_DEVICE float run(DkvAccumulator& dk, DkvAccumulator& dv) const {
    using ScoreGrid = typename T::ScoreGrid;
    const AttentionArguments& args = tile.p.work.args;
    const TileGradients<C> gradients{tile};
    const int group = args.heads_q / args.heads_kv, first_head = tile.kv_head * group;
    const int last_first = tile.begin / T::kBlockM * T::kBlockM;
    const int tiles = (tile.end - last_first + T::kBlockM - 1) / T::kBlockM;
    const int count = tile.begin < tile.end ? tiles * group : 0;
    const int restart = last_first + (tiles - 1) * T::kBlockM;
    Iterator next{first_head, restart, last_first, restart}, query = next;
    float ds_amax = 0;
    if (count > 0) {
      loader.load_keys({shared_address(tile.s.k)}, args.k, args.dim_qk);
      loader.load_keys({shared_address(tile.s.v)}, args.v, args.dim_v);
      loader.load_query_tile(next, 0);
    }
    for (int n = 0; n < count; ++n, query.advance()) {
      const int stage = T::kStages == 2 ? n & 1 : 0;
      cp_async_wait<0>();
      __syncthreads();  // Q and dO have arrived, and every warp has read the previous P and dS
      next.advance();
      if (T::kStages == 2 && n + 1 < count) loader.load_query_tile(next, stage ^ 1);
      const int thread = opaque_thread(static_cast<int>(threadIdx.x));
      const typename TileGradients<C>::Position at{ScoreGrid::row(thread / 32),
                                                   ScoreGrid::column(thread / 32), thread % 32};
      if constexpr (T::kGeneral)
        gradients.compute_general(query, stage, at, &ds_amax);
      else
        gradients.compute_plain(query, stage, at);
      __syncthreads();  // P and dS of all warps are in shared memory
      const int row = DkvGrid::row(thread / 32), column = DkvGrid::column(thread / 32);
      const typename T::ScoreOperand p{shared_address(tile.s.p)}, ds{shared_address(tile.s.ds)};
      gemm<T::kDtype, T::kBlockM / 16, Major::kMn, Major::kMn>(
          dv, p, row, typename T::Operand{shared_address(tile.s.dout[stage])}, column);
      gemm<T::kDtype, T::kBlockM / 16, Major::kMn, Major::kMn>(
          dk, ds, row, typename T::Operand{shared_address(tile.s.q[stage])}, column);
      if (tile.p.work.buffers.dq) add_dq(query, thread);
      if (T::kStages == 1 && n + 1 < count) {
        __syncthreads();  // every warp has read Q and dO
        loader.load_query_tile(next, 0);
      }
    }
    return ds_amax;
  }
};

}  // namespace tea::portable
