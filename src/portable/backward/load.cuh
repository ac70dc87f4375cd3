// Loads of the main backward kernel: K and V once, then Q, dO and the row statistics of each query
// tile.
#pragma once
#include "portable/backward/load_rows.cuh"
#include "portable/backward/work_tile.cuh"

namespace tea::portable {

template <BackwardConfig C>
struct BackwardLoader {
  using T = BackwardTraits<C>;
  using Iterator = QueryTileIterator<T::kBlockM>;

  const BackwardWorkTile<C>& tile;

  TEA_DEVICE void load_keys(const typename T::Operand& to, const StridedTensor& rows,
                            int dim) const {
    const SequencePair& seq = tile.seq;
    const int64_t at = first_element(rows, tile.p.work.args.keys, seq.kv, seq.batch, tile.kv_head);
    load_rows<T::kGeneral, T::kBlockN, T::kThreads>(to, rows, at, tile.key, seq.attended, 0, dim);
  }
  TEA_DEVICE void load_queries(const typename T::Operand& to, const StridedTensor& rows, int dim,
                               const Iterator& at) const {
    const SequencePair& seq = tile.seq;
    const int64_t from = first_element(rows, tile.p.work.args.queries, seq.q, seq.batch, at.head);
    load_rows<T::kGeneral, T::kBlockM, T::kThreads>(to, rows, from, at.first, tile.attending, 0,
                                                    dim);
  }
  TEA_DEVICE void load_query_tile(const Iterator& at, int stage) const {
    const AttentionArguments& args = tile.p.work.args;
    const BackwardBuffers& buffers = tile.p.work.buffers;
    load_queries({shared_address(tile.s.q[stage])}, args.q, args.dim_qk, at);
    load_queries({shared_address(tile.s.dout[stage])}, args.dout, args.dim_v, at);
    const int i = opaque_thread(static_cast<int>(threadIdx.x)), row = at.first + i;
    if (i < T::kBlockM) {
      const bool valid = row >= tile.attending.begin && row < tile.attending.end;
      const int64_t entry = valid ? first_entry(tile.p.work, tile.seq, at.head) + row : 0;
      cp_async_4(shared_address(&tile.s.lse2[stage][i]), buffers.lse2 + entry, valid);
      cp_async_4(shared_address(&tile.s.delta[stage][i]), buffers.delta + entry, valid);
    }
    cp_async_commit();
  }
};

}  // namespace tea::portable
