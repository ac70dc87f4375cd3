// The load warp: copies Q, and K and V in blocks of keys, last block first, and a bias, from global
// to shared memory by TMA.
#pragma once
#include "hopper/forward/shared_memory.cuh"
#include "hopper/row_box.cuh"

namespace tea::hopper {

// The rows of a bias in shared memory for a tile (BiasTile::rows): none where a box would not start
// at a multiple of 16 bytes, for which TMA raises a fault.
TEA_DEVICE int bias_rows_of(const KernelParams& p, const WorkTile& w) {
  return w.skipped_keys % 8 ? 0 : p.bias_rows;
}

// Run by one thread.
template <KernelConfig C>
struct LoadWarp {
  using T = Traits<C>;
  static constexpr int kBlockN = T::kBlockN, kConsumers = T::kConsumers;
  static constexpr int kSlabBytes = T::kSlabBytes, kSlabDim = T::kSlabDim;

  const KernelParams& p;
  typename T::SharedStorage& s;
  const int slabs = T::num_slabs(p.args.dim_qk), slabs_v = T::num_slabs(p.args.dim_v);
  PipelineState<T::kQStages> q_state{};
  PipelineState<T::kKvStages> k_state{}, v_state{};
  PipelineState<2> work_state{};
  PipelineState<1> bias_state{};

  // Loads the `slabs` slabs (at most kSlabs) of a box. The coordinates are computed before the
  // wait, because consumers wait for everything that happens after it.
  template <int kHeight, int kSlabs, int kStages>
  TEA_DEVICE void load_slabs(uint8_t* to, const TensorMap& map, Pipeline<kStages>& pipeline,
                             PipelineState<kStages> state, int slabs, const RowBox& b,
                             CachePolicy cache) {
    pipeline.producer_acquire(state);
    pipeline.producer_expect_tx(state, slabs * kHeight * kSlabBytes);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
      if (slab < slabs)
        tma_load(to + slab * kHeight * kSlabBytes, map, pipeline.full[state.stage],
                 {slab * kSlabDim, b.y, b.head, b.z, b.batch}, cache);
  }
  TEA_DEVICE void load_q(const WorkTile& w) {
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) {
      const int row = w.first_row + 64 * c;
      if (row < w.seqlen_q) {
        load_slabs<64, T::kDim / kSlabDim>(
            s.q[q_state.stage][c], p.q, s.pipeline_q[c], q_state, slabs,
            {64, w.start_q + row, w.seqlen_q - row, w.head, T::batch_of(p.args.queries, w)},
            CachePolicy::kEvictFirst);
      } else {
        s.pipeline_q[c].producer_acquire(q_state);
        arrive(s.pipeline_q[c].full[q_state.stage]);
      }
    }
    q_state.advance();
  }
  // The coordinates that all key blocks of a tile share.
  struct Keys {
    int start, count, head, batch;
    TEA_DEVICE RowBox block(int number) const {
      const int key = number * kBlockN;
      return {kBlockN, start + key, count - key, head, batch};
    }
  };
  TEA_DEVICE void load_k(const Keys& keys, int block) {
    load_slabs<kBlockN, T::kDim / kSlabDim>(s.k[k_state.stage], p.k, s.pipeline_k, k_state, slabs,
                                            keys.block(block), CachePolicy::kEvictLast);
    k_state.advance();
  }
  TEA_DEVICE void load_v(const Keys& keys, int block) {
    load_slabs<kBlockN, T::kDimV / kSlabDim>(s.v[v_state.stage], p.v, s.pipeline_v, v_state,
                                             slabs_v, keys.block(block), CachePolicy::kEvictLast);
    v_state.advance();
  }
  // The bias of each consumer's rows for a block. Here too, no box without a valid element is
  // loaded.
  TEA_DEVICE void load_bias(const WorkTile& w, int block) {
    const int height = bias_rows_of(p, w);
    if (!height) return;
    const int key = block * kBlockN, keys = min(kBlockN, w.seqlen_kv - key);
    const int bias_slabs = (keys + BiasTile::kColumns - 1) / BiasTile::kColumns;
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) {
      Pipeline<1>& pipeline = s.pipeline_bias[c];
      const int row = w.first_row + 64 * c;
      pipeline.producer_acquire(bias_state);
      if (row >= w.seqlen_q) {
        arrive(pipeline.full[0]);
        continue;
      }
      pipeline.producer_expect_tx(bias_state, bias_slabs * height * width(BiasTile::kSwizzle));
#pragma unroll 1
      for (int slab = 0; slab < bias_slabs; ++slab)
        tma_load(s.bias[c] + slab * BiasTile::kSlabBytes, p.bias, pipeline.full[0],
                 {w.skipped_keys + key + slab * BiasTile::kColumns, height > 1 ? row : 0,
                  w.bias_head, w.bias_batch});
    }
    bias_state.advance();
  }
  TEA_DEVICE void load_tile(const WorkTile& w) {
    const Range b = w.blocks;
    if (b.begin == b.end) return load_q(w);
    const Keys keys = {w.start_kv, w.seqlen_kv, w.head_kv, T::batch_of(p.args.keys, w)};
    load_k(keys, b.end - 1);  // before Q, whose stage is in use for longer
    load_q(w);
    if constexpr (C.bias()) load_bias(w, b.end - 1);
    for (int block = b.end - 1; block > b.begin; --block) {
      if (block - b.begin == T::kFetchLead) arrive(s.nearly_loaded);
      load_k(keys, block - 1);
      load_v(keys, block);
      if constexpr (C.bias()) load_bias(w, block - 1);
    }
    load_v(keys, b.begin);
  }
  TEA_DEVICE void run() {
    for (;;) {
      const WorkTile& w = s.work.read(work_state);
      if (w.head < 0) return;
      load_tile(w);
      s.work.pipeline.consumer_release(work_state);
      work_state.advance();
    }
  }
};

// Zeroes the slabs of Q and K beyond the head dimension, which no load fills. Called by all
// threads.
template <KernelConfig C>
TEA_DEVICE void zero_unused_slabs(const KernelParams& p, typename Traits<C>::SharedStorage& s) {
  using T = Traits<C>;
  const auto zero = [&](uint8_t* tile, int height) {
    const int first = T::num_slabs(p.args.dim_qk) * height * T::kSlabBytes;
    for (int at = first + static_cast<int>(threadIdx.x) * 16; at < height * T::kDim * 2;
         at += T::kThreads * 16)
      *reinterpret_cast<uint4*>(tile + at) = uint4{};
  };
  for (auto& stage : s.q)
    for (auto& tile : stage) zero(tile, 64);
  for (auto& tile : s.k) zero(tile, T::kBlockN);
  fence_proxy_async();
}

}  // namespace tea::hopper
