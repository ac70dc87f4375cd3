// The mainloop of a consumer warpgroup: S = Q K^T, softmax and O += P V over the key blocks of a
// tile, last block first. The scores of a block are computed together with the P V of the block
// before (FlashAttention-3: intra-warpgroup overlap).
#pragma once
#include "hopper/forward/epilogue.cuh"
#include "hopper/forward/softmax.cuh"

namespace tea::hopper {

// The order in which consumers issue wgmmas, one named barrier for each (FlashAttention-3:
// ping-pong scheduling): while one consumer computes its softmax, the next one has the tensor
// cores.
template <KernelConfig C>
struct PingPong {
  static constexpr int kFirstBarrier = 1, kConsumers = C.tile.consumer_warpgroups;
  const int consumer;

  TEA_DEVICE void wait() {
    if constexpr (C.tile.ping_pong) named_barrier_sync(kFirstBarrier + consumer, 256);
  }
  TEA_DEVICE void arrive_next() {
    if constexpr (C.tile.ping_pong)
      named_barrier_arrive(kFirstBarrier + (consumer + 1 == kConsumers ? 0 : consumer + 1), 256);
  }
  // The last consumer lets the first one begin.
  TEA_DEVICE void start() {
    if (C.tile.ping_pong && consumer == kConsumers - 1) arrive_next();
  }
  TEA_DEVICE void skip() {
    wait();
    arrive_next();
  }
};

template <KernelConfig C>
struct Mainloop {
  using T = Traits<C>;
  using State = ConsumerState<C>;
  static constexpr int kBlockN = T::kBlockN, kSlabBytes = T::kSlabBytes;
  static constexpr int kAccumulatorV = T::kDimV / 2;
  // The index of the last exponential that each thread computes before it waits for P V: the first
  // seven.
  static constexpr int kLastExponentialBeforeWait = 6;
  // Masked kernels for more than 128 dimensions, other than the general ones, have no register pair
  // left for descriptors.
  static constexpr bool kFewRegisters = C.masked() && !C.general() && T::kDim > 128;
  static constexpr DescriptorAdd kAdd =
      kFewRegisters ? DescriptorAdd::k32Bit : DescriptorAdd::k64Bit;

  const KernelParams& p;
  typename T::SharedStorage& s;
  const int consumer;
  PipelineState<T::kQStages> q_state{};
  PipelineState<T::kKvStages> k_state{}, v_state{};
  PipelineState<2> work_state{};
  SoftmaxStep<C> step{p, s, consumer};
  Epilogue<C> epilogue{p, s, consumer};
  PingPong<C> ping_pong{consumer};

  TEA_DEVICE int first_row(const WorkTile& w) { return w.first_row + 64 * consumer; }
  static TEA_DEVICE void clear(float (&o)[kAccumulatorV]) {
#pragma unroll
    for (int i = 0; i < kAccumulatorV; ++i) o[i] = 0;
  }

  // Releases a stage when wgmma has read it. One thread of each warp arrives.
  template <int kStages>
  TEA_DEVICE void release(Pipeline<kStages>& pipeline, PipelineState<kStages>& state) {
    if (lane() == 0) pipeline.consumer_release(state);
    state.advance();
  }
  // Releases a stage that this consumer does not use. __syncwarp() is required: lane 0 releases the
  // stage for the whole warp, and the phase may flip twice before another lane has left the wait.
  template <int kStages>
  TEA_DEVICE void skip_stage(Pipeline<kStages>& pipeline, PipelineState<kStages>& state) {
    pipeline.consumer_wait(state);
    __syncwarp();
    release(pipeline, state);
  }

  // Issues scores = Q K^T. Q and K have arrived.
  TEA_DEVICE void gemm_qk(State& x) {
    const uint64_t a = make_descriptor(s.q[q_state.stage][consumer], T::kSwizzle);
    const uint64_t b = make_descriptor(s.k[k_state.stage], T::kSwizzle);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < T::kDim / 16; ++k) {
      const int slab = k * 32 / kSlabBytes, at = k * 32 % kSlabBytes;
      wgmma<WgmmaShape{kBlockN, C.type, C.type}>(
          x.scores, advance_descriptor<kAdd>(a, slab * 64 * kSlabBytes + at),
          advance_descriptor<kAdd>(b, slab * kBlockN * kSlabBytes + at), k > 0);
    }
    wgmma_commit();
  }
  // Waits for V and issues O += P V.
  TEA_DEVICE void gemm_pv(State& x) {
    s.pipeline_v.consumer_wait(v_state);
    const uint64_t b = make_descriptor(s.v[v_state.stage], T::kSwizzle, kBlockN * kSlabBytes);
    wgmma_fence_operand(x.o);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k)
      wgmma<WgmmaShape{T::kDimV, C.type, C.type, Major::kK, Major::kMN}>(
          x.o, x.p[k], advance_descriptor<kAdd>(b, k * 16 * kSlabBytes), true);
    wgmma_commit();
  }

  // Releases `count` blocks that are masked for all rows of this consumer. Without staggering it
  // takes its ping-pong slot for each, because the other consumers expect it.
  TEA_DEVICE void skip_blocks(int count, int bias_rows) {
    for (int i = 0; i < count; ++i) {
      skip_stage(s.pipeline_k, k_state);
      step.skip_bias(bias_rows);
      if constexpr (!C.tile.staggered) ping_pong.skip();
      skip_stage(s.pipeline_v, v_state);
    }
  }
  // Releases the first `count` blocks of a tile where consumers are staggered. All consumers take
  // the same number of ping-pong slots, which may differ from the number of blocks; this one has no
  // use for `slots` of them. V of the last of these blocks is not released here, because it arrives
  // after K of the next block.
  TEA_DEVICE void skip_first_blocks(int count, int slots) {
#pragma unroll 1
    for (int i = 0; i < max(count, slots); ++i) {
      if (i < count) skip_stage(s.pipeline_k, k_state);
      if (i < slots) ping_pong.skip();
      if (i + 1 < count) skip_stage(s.pipeline_v, v_state);
    }
  }

  // The first block of a tile: its scores overlap with nothing. Returns the blocks that are visible
  // to all rows.
  TEA_DEVICE Range first_block(State& x, const WorkTile& w, int block) {
    s.pipeline_k.consumer_wait(k_state);
    ping_pong.wait();
    gemm_qk(x);
    ping_pong.arrive_next();
    const Range unmasked = w.template unmasked_blocks<kBlockN>(first_row(w));
    uint32_t visible[2] = {~0u, ~0u};
    bool half = false;
    if constexpr (C.tile.half_first_block) {  // while the products are computed
      if (block < unmasked.begin || block >= unmasked.end) step.find_visible(visible, w, block);
      half = !(__reduce_or_sync(0xffffffff, visible[0] | visible[1]) >> kBlockN / 8);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(x.scores);
    release(s.pipeline_k, k_state);
    x.softmax.start();
    if constexpr (C.tile.half_first_block)
      step.softmax_first(x, visible, half);
    else
      step.template softmax<true>(x, w, block, unmasked, [] {});
    clear(x.o);
    step.convert_p(x, w, block);
    return unmasked;
  }
  // The scores and softmax of a block, overlapped with P V of the block before. kMayMask: some row
  // may not attend to all keys.
  template <bool kMayMask>
  TEA_DEVICE void next_block(State& x, const WorkTile& w, int block, Range unmasked) {
    s.pipeline_k.consumer_wait(k_state);
    ping_pong.wait();
    gemm_qk(x);
    if constexpr (C.tile.rescale_before_pv) scale_rows(x.o, x.rescale);
    gemm_pv(x);
    ping_pong.arrive_next();
    wgmma_wait<1>();
    wgmma_fence_operand(x.scores);
    release(s.pipeline_k, k_state);
    step.template softmax<kMayMask>(x, w, block, unmasked, [&] {
      wait_after(x.scores[kLastExponentialBeforeWait], s.never_written);
      wgmma_wait<0>();
      wgmma_fence_operand(x.o);
      release(s.pipeline_v, v_state);
      if constexpr (!C.tile.rescale_before_pv) scale_rows(x.o, x.rescale);
    });
    step.convert_p(x, w, block);
  }
  // P V of a tile's last block, overlapped with the row statistics, and the store of O.
  TEA_DEVICE void finish_tile(State& x, const WorkTile& w) {
    if constexpr (C.tile.rescale_before_pv) scale_rows(x.o, x.rescale);
    gemm_pv(x);
    const auto result = epilogue.write_statistics(x.softmax, w);
    wgmma_wait<0>();
    wgmma_fence_operand(x.o);
    release(s.pipeline_v, v_state);
    store(x, result, w);
  }
  // All threads release the work descriptor, because all of them have read it.
  TEA_DEVICE void store(State& x, const typename Epilogue<C>::Result& result, const WorkTile& w) {
    epilogue.store(x.o, result, w);
    s.work.pipeline.consumer_release(work_state);
    work_state.advance();
  }
  // A tile of which no row of this consumer attends to any key.
  TEA_DEVICE void skip_tile(State& x, const WorkTile& w) {
    skip_stage(s.pipeline_q[consumer], q_state);
    const int count = w.blocks.end - w.blocks.begin;
    if constexpr (C.tile.staggered) {
      skip_first_blocks(count, w.max_consumer_blocks);
      if (count > 0) skip_stage(s.pipeline_v, v_state);
    } else {
      skip_blocks(count, bias_rows_of(p, w));
    }
    clear(x.o);
    x.softmax.start();
    store(x, epilogue.write_statistics(x.softmax, w), w);
  }

  // The blocks of a tile that this consumer computes.
  TEA_DEVICE Range own_blocks(const WorkTile& w) {
    if constexpr (!C.tile.skips_blocks) return w.blocks;
    if constexpr (C.tile.staggered) return w.consumer_blocks[consumer];
    return w.template visible_blocks<kBlockN>(first_row(w), 64);
  }
  TEA_DEVICE void compute_tile(State& x, const WorkTile& w) {
    const Range own = own_blocks(w);
    if (own.begin >= own.end) return skip_tile(x, w);
    s.pipeline_q[consumer].consumer_wait(q_state);
    const int skipped_last = own.begin - w.blocks.begin, bias_rows = bias_rows_of(p, w);
    int block = own.end - 1;
    const int skipped_first = w.blocks.end - own.end;
    if constexpr (C.tile.staggered)
      skip_first_blocks(skipped_first, w.max_consumer_blocks - (own.end - own.begin));
    else
      skip_blocks(skipped_first, bias_rows);
    const Range unmasked = first_block(x, w, block);
    if constexpr (C.tile.staggered)
      if (skipped_first > 0) skip_stage(s.pipeline_v, v_state);
    const auto down_to = [&](int last, auto may_mask) {
      for (; block > last; --block) next_block<may_mask>(x, w, block - 1, unmasked);
    };
    if constexpr (C.masked() && !C.general()) {
      down_to(max(own.begin, unmasked.end), std::true_type());
      down_to(max(own.begin, unmasked.begin), std::false_type());
    }
    // Without a mask only the first block is partial. Score modifications apply to every block.
    down_to(own.begin, std::bool_constant<C.masked()>());
    release(s.pipeline_q[consumer], q_state);
    finish_tile(x, w);
    skip_blocks(skipped_last, bias_rows);  // w has been released
  }

  TEA_DEVICE void run() {
    ping_pong.start();
    State x;
    for (;;) {
      const WorkTile& w = s.work.read(work_state);
      if (w.head < 0) break;
      compute_tile(x, w);
    }
  }
};

}  // namespace tea::hopper
