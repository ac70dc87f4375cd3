// The load warp: copies K and V of a tile, and Q, dO and the row terms of each step, from global to
// shared memory. row_box.cuh explains the boxes.
#pragma once
#include "hopper/backward/shared_memory.cuh"
#include "hopper/row_box.cuh"

namespace tea::hopper::backward {

// Run by one thread.
template <KernelConfig C>
struct LoadWarp {
  using T = Traits<C>;
  static constexpr int kBlockM = T::kBlockM;

  const KernelParams& p;
  typename T::SharedStorage& s;
  const int slabs = T::num_slabs(p.args.dim_qk), slabs_v = T::num_slabs(p.args.dim_v);
  PipelineState<2> work_state{};
  PipelineState<1> k_state{}, v_state{};
  PipelineState<T::kQStages> q_state{};
  PipelineState<T::kDoutStages> dout_state{};

  template <int kHeight>
  TEA_DEVICE void load_slabs(uint8_t* to, const TensorMap& map, Barrier& full, int slabs,
                             const RowBox& b, CachePolicy cache) {
#pragma unroll
    for (int slab = 0; slab < T::kSlabs; ++slab)
      if (slab < slabs)
        tma_load(to + slab * kHeight * T::kSlabBytes, map, full,
                 {slab * T::kSlabDim, b.y, b.head, b.z, b.batch}, cache);
  }
  TEA_DEVICE RowBox rows_of(const WorkTile& w, int head, int block) {
    const int row = block * kBlockM;
    return {kBlockM, w.start_q + row, w.rows - row, head, T::batch_of(p.args.queries, w)};
  }
  TEA_DEVICE void load_q(const WorkTile& w, int head, int block) {
    const RowBox box = rows_of(w, head, block);
    const int64_t row_block = head * p.work.row_blocks.per_head + w.row_block + block;
    s.pipeline_q.producer_acquire(q_state);
    s.pipeline_q.producer_expect_tx(q_state, slabs * kBlockM * T::kSlabBytes + sizeof s.terms[0]);
    Barrier& full = s.pipeline_q.full[q_state.stage];
    load_slabs<kBlockM>(s.q[q_state.stage], p.q, full, slabs, box, CachePolicy::kEvictLast);
    bulk_load(s.terms[q_state.stage], p.work.terms + row_block * kBlockM, sizeof s.terms[0], full);
    q_state.advance();
  }
  TEA_DEVICE void load_dout(const WorkTile& w, int head, int block) {
    const RowBox box = rows_of(w, head, block);
    s.pipeline_dout.producer_acquire(dout_state);
    s.pipeline_dout.producer_expect_tx(dout_state, slabs_v * kBlockM * T::kSlabBytes);
    load_slabs<kBlockM>(s.dout[dout_state.stage], p.dout, s.pipeline_dout.full[dout_state.stage],
                        slabs_v, box, CachePolicy::kEvictLast);
    dout_state.advance();
  }
  TEA_DEVICE RowBox keys_of(const WorkTile& w) {
    return {kBlockN, w.start_kv + w.first_key, w.keys - w.first_key, w.head_kv,
            T::batch_of(p.args.keys, w)};
  }
  // Brings them into L2 while the tile before still uses their memory.
  TEA_DEVICE void prefetch_keys(const TensorMap& map, int slabs, const WorkTile& w) {
    const RowBox b = keys_of(w);
#pragma unroll
    for (int slab = 0; slab < T::kSlabs; ++slab)
      if (slab < slabs) tma_prefetch(map, {slab * T::kSlabDim, b.y, b.head, b.z, b.batch});
  }
  TEA_DEVICE void load_keys(uint8_t* to, const TensorMap& map, Pipeline<1>& pipeline,
                            PipelineState<1>& state, int slabs, const WorkTile& w) {
    const RowBox box = keys_of(w);
    pipeline.producer_acquire(state);
    pipeline.producer_expect_tx(state, slabs * kBlockN * T::kSlabBytes);
    load_slabs<kBlockN>(to, map, pipeline.full[state.stage], slabs, box, CachePolicy::kEvictFirst);
    state.advance();
  }
  // Rows are visited from the last to the first: all tiles of a head then meet the same rows at
  // about the same time, and tiles end with the rows on the diagonal of a causal mask. All heads of
  // a tile visit a row block before the next one, since under such a mask later key blocks would
  // finish a head sooner and wait at the next head for the first key block. Q and dO of the first
  // step come first, because their stages are free before K of the tile before is.
  TEA_DEVICE void load_tile(const WorkTile& w) {
    if constexpr (C.tile.ping_pong) {  // at d = 128 tiles took 1 % longer with it
      prefetch_keys(p.k, slabs, w);
      prefetch_keys(p.v, slabs_v, w);
    }
    for (int block = w.row_blocks.end - 1; block >= w.row_blocks.begin; --block)
      for (int head = w.first_head; head < w.last_head; ++head) {
        const bool first = head == w.first_head && block == w.row_blocks.end - 1;
        load_q(w, head, block);
        if (first) load_keys(s.k, p.k, s.pipeline_k, k_state, slabs, w);
        load_dout(w, head, block);
        if (first) load_keys(s.v, p.v, s.pipeline_v, v_state, slabs_v, w);
      }
  }
  TEA_DEVICE void run() {
    for (;;) {
      const WorkTile& w = s.work.read(work_state);
      if (w.head_kv < 0) return;
      load_tile(w);
      arrive(s.all_loads_issued);
      s.work.pipeline.consumer_release(work_state);
      work_state.advance();
    }
  }
};

// Zeroes all operands, of which loads fill only the slabs within the head dimensions. Called by all
// threads.
template <KernelConfig C>
TEA_DEVICE void zero_operands(typename Traits<C>::SharedStorage& s) {
  const int bytes = static_cast<int>(s.ds[0] - s.k);
  for (int at = static_cast<int>(threadIdx.x) * 16; at < bytes; at += Traits<C>::kThreads * 16)
    *reinterpret_cast<uint4*>(s.k + at) = uint4{};
  fence_proxy_async();
}

}  // namespace tea::hopper::backward
