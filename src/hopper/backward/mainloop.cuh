// The mainloop of a consumer warpgroup, which has 64 keys of a tile: for each step, a block of
// query rows of one head, it computes
//
//   S^T = K Q^T, dP^T = V dO^T           64 keys x block_m rows
//   P = exp(scale (S - LSE / scale)), dS = P (dP - delta)
//   dV += P^T dO, dK += dS^T Q           P^T and dS^T are operands in registers
//   dQ  = dS K                           64 x 64 of the step, with dS of both consumers' keys
//
// as FlashAttention-3 does (Shah et al., 2024). Scores are transposed, so that P^T and dS^T stay in
// registers. Unlike there, the products add -LSE / scale and -delta: loads of these from shared
// memory into registers took 7 % of the time.
#pragma once
#include "hopper/backward/epilogue.cuh"
#include "hopper/device/softmax.cuh"
#include "hopper/device/wgmma.cuh"

namespace tea::hopper::backward {

// Sets the elements of the thread's row r whose bit is clear to zero.
template <int kCount>
TEA_DEVICE void zero_columns(float (&d)[kCount], int r, uint32_t visible) {
#pragma unroll
  for (int n = 0; n < kCount / 2; ++n)
    if (!(visible & 1u << n)) d[n / 2 * 4 + n % 2 + 2 * r] = 0;
}

template <KernelConfig C>
struct Mainloop {
  using T = Traits<C>;
  static constexpr int kDim = T::kDim, kBlockM = T::kBlockM, kSlabBytes = T::kSlabBytes;
  static constexpr int kScores = kBlockM / 2;  // per thread
  static constexpr int kDsSlabBytes = T::kDsSlabBytes;
  static constexpr bool kPingPong = C.tile.ping_pong;

  using Scores = float[kScores];
  using Gradient = float[kDim / 2];  // of K or V
  using Operand = uint32_t[kBlockM / 16][4];

  const KernelParams& p;
  typename T::SharedStorage& s;
  const int consumer;
  PipelineState<2> work_state{};
  PipelineState<2> step_state{};  // of Q, dO and dS
  uint32_t tile_parity = 0;       // of K and V
  bool stores_pending = false;    // of dV and dK of the tile before, by TMA
  Epilogue<C> epilogue{p, s, consumer};
  static_assert(T::kQStages == 2 && T::kDoutStages == 2);

  TEA_DEVICE void release(Barrier& empty) {
    if (epilogue.elected) arrive(empty);
  }

  // Issues x = (this consumer's 64 rows of `keys`) (`rows`)^T + the terms of each row that have
  // ones in `selector`: a product of 16 columns, whose halves are the same memory in both operands,
  // and bf16 in kernels of any type.
  TEA_DEVICE void gemm_scores(Scores& x, const uint8_t* keys, const uint8_t* rows,
                              const RowTerms (&selector)[8]) {
    const uint64_t a = make_descriptor(keys + consumer * 64 * kSlabBytes, T::kSwizzle);
    const uint64_t b = make_descriptor(rows, T::kSwizzle);
    wgmma_fence();
    wgmma<WgmmaShape{kBlockM, Type::kBf16, Type::kBf16}>(
        x, make_repeating_descriptor(selector),
        make_descriptor(s.terms[step_state.stage], Swizzle::kNone, 0), false);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const int slab = k * 32 / kSlabBytes, at = k * 32 % kSlabBytes;
      wgmma<WgmmaShape{kBlockM, C.type, C.type}>(
          x, advance_descriptor(a, slab * kBlockN * kSlabBytes + at),
          advance_descriptor(b, slab * kBlockM * kSlabBytes + at), true);
    }
    wgmma_commit();
  }
  // Issues x += a `rows`.
  TEA_DEVICE void gemm_gradient(Gradient& x, const Operand& a, const uint8_t* rows) {
    const uint64_t b = make_descriptor(rows, T::kSwizzle, kBlockM * kSlabBytes);
    wgmma_fence_operand(x);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kBlockM / 16; ++k)
      wgmma<WgmmaShape{kDim, C.type, C.type, Major::kK, Major::kMN}>(
          x, a[k], advance_descriptor(b, k * 16 * kSlabBytes), true);
    wgmma_commit();
  }
  // Issues this consumer's part of dQ: 64 columns if a step has 64 rows, else 64 rows.
  TEA_DEVICE void gemm_dq(float (&x)[32], int stage) {
    constexpr bool kByRows = kBlockM == 128;
    const int columns = kByRows ? 0 : consumer * 64;
    const uint8_t* const ds = s.ds[stage] + (kByRows ? consumer * 64 * width(T::kDsSwizzle) : 0);
    const uint8_t* const k = s.k + columns / T::kSlabDim * kBlockN * kSlabBytes;
    const uint64_t a = make_descriptor(ds, T::kDsSwizzle);
    const uint64_t b = make_descriptor(k, T::kSwizzle, kBlockN * kSlabBytes);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBlockN / 16; ++i)
      wgmma<WgmmaShape{64, C.type, C.type, Major::kK, Major::kMN}>(
          x, advance_descriptor(a, i / 4 * kDsSlabBytes + i % 4 * 32),
          advance_descriptor(b, i * 16 * kSlabBytes), i > 0);
    wgmma_commit();
  }

  // One bit for each row of a block that attends to the key of the accumulator's row.
  TEA_DEVICE uint32_t find_visible(const AccumulatorOrigin& origin, int r, const WorkTile& w,
                                   int block) {
    const int key = w.first_key + 64 * consumer + origin.row + 8 * r;
    const int first = key - block * kBlockM;
    if (key >= w.keys) return 0;
    return column_mask<kBlockM>(first - w.hi, first - w.lo + 1, origin.column);
  }
  // The row blocks that need no mask: every row attends to all of this consumer's keys. Rows
  // past the end need no mask: their operands are zero, and so is their P. Found once for a tile,
  // because a step would wait for its loads from the descriptor.
  TEA_DEVICE Range unmasked_blocks(const WorkTile& w) {
    const int key = w.first_key + 64 * consumer;
    if (key + 64 > w.keys) return {0, 0};
    return {(max(key + 63 - w.hi, 0) + kBlockM - 1) / kBlockM, max(key + 1 - w.lo, 0) / kBlockM};
  }

  // Scores become probabilities. Rounding of large scores must not make one larger than 1.
  TEA_DEVICE void compute_p(Scores& x) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) x[i] = exp2_fast(min_nan(x[i] * p.scale_log2, 0.0f));
  }
  TEA_DEVICE void compute_ds(Scores& dp, const Scores& probability) {
#pragma unroll
    for (int i = 0; i < kScores; ++i) dp[i] *= probability[i];
  }
  // Masked elements are zero.
  TEA_DEVICE void apply_mask(Scores& probability, Scores& ds, const WorkTile& w, int block) {
    const AccumulatorOrigin origin = reread_accumulator_origin();
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t visible = find_visible(origin, r, w, block);
      zero_columns(probability, r, visible);
      zero_columns(ds, r, visible);
    }
  }
  static TEA_DEVICE void to_operand(Operand& a, const Scores& x) {
#pragma unroll
    for (int c = 0; c < kBlockM / 16; ++c) accumulator_as_operand<C.type>(a[c], x, c);
  }
  // Writes dS, transposed: its rows are query rows, its columns this consumer's keys.
  TEA_DEVICE void write_ds(const Operand& a) {
    const uint32_t to = shared_address(s.ds[step_state.stage]) + consumer * kDsSlabBytes;
    const int at = warp_in_warpgroup() * 32 + lane() / 8 % 2 * 16;
#pragma unroll
    for (int c = 0; c < kBlockM / 16; ++c)
      stmatrix_x4_trans(to + swizzled(T::kDsSwizzle, 16 * c + lane() / 16 * 8 + lane() % 8, at),
                        a[c]);
  }

  // Without ping-pong, one barrier in a step says that dS of both consumers has been written.
  //
  // With it, consumer 0 is half a step ahead, so that one consumer computes P and dS while the
  // tensor cores work for the other one. Before its exponentials, each waits for dS of the other
  // one: consumer 1 for that of the same step, consumer 0 for that of the step before. Consumer 0
  // therefore computes dQ a step late.
  TEA_DEVICE bool is_ahead() { return kPingPong && consumer == 0; }
  TEA_DEVICE void wait_for_other_ds() {
    named_barrier_sync(BarrierId::kDs + (consumer ^ 1), 128 * T::kConsumers);
  }
  // By each thread that wrote dS, before wgmma reads it.
  TEA_DEVICE void publish_ds() {
    fence_proxy_async();
    if constexpr (kPingPong) {
      named_barrier_arrive(BarrierId::kDs + consumer, 128 * T::kConsumers);
      if (!is_ahead()) named_barrier_sync(BarrierId::kOwn + consumer, 128);
    } else {
      named_barrier_sync(BarrierId::kDs, 128 * T::kConsumers);
    }
  }
  // Waits until dV and dK of the tile before have left shared memory, where dS is written next, and
  // releases the stage of Q and dO of that tile's last step.
  TEA_DEVICE void finish_stores() {
    epilogue.wait_for_stores();
    release(s.pipeline_dout.empty[step_state.stage ^ 1]);
    release(s.pipeline_q.empty[step_state.stage ^ 1]);
  }
  // One step. `masks`: whether it has masked elements; `first`, `last`: of the tile.
  TEA_DEVICE void step(Gradient& dk, Gradient& dv, const WorkTile& w, int block, bool masks,
                       bool first, bool last) {
    Scores x, dp;
    Operand pa, dsa;
    const int stage = step_state.stage;
    const bool has_dq = !(is_ahead() && first);
    s.pipeline_q.consumer_wait(step_state);
    gemm_scores(x, s.k, s.q[stage], s.selectors[0]);
    s.pipeline_dout.consumer_wait(step_state);
    gemm_scores(dp, s.v, s.dout[stage], s.selectors[1]);
    if (kPingPong && has_dq) wait_for_other_ds();
    wgmma_wait<1>();  // S
    wgmma_fence_operand(x);
    compute_p(x);
    wgmma_wait<0>();
    wgmma_fence_operand(dp);
    if (last) release(s.pipeline_v.empty[0]);
    compute_ds(dp, x);
    // No wgmma is in flight here, which a branch would serialise.
    if (masks) apply_mask(x, dp, w, block);
    if (!kPingPong && first && stores_pending) finish_stores();  // late: TMA has had most of a step
    if constexpr (!kPingPong) to_operand(pa, x);
    to_operand(dsa, dp);
    write_ds(dsa);
    if constexpr (kPingPong) to_operand(pa, x);  // the other consumer waits for dS
    gemm_gradient(dv, pa, s.dout[stage]);        // while the fence waits for the writes
    publish_ds();
    float dq[32];
    // Without has_dq, nothing uses the result; a branch around it would serialise the wgmmas in
    // flight.
    gemm_dq(dq, is_ahead() ? stage ^ 1 : stage);
    gemm_gradient(dk, dsa, s.q[stage]);
    wgmma_wait<1>();  // dV and dQ
    wgmma_fence_operand(dq);
    wgmma_fence_operand(dv);
    const bool releases = !(last && p.stores_by_tma);  // otherwise by finish_stores()
    if (releases) release(s.pipeline_dout.empty[stage]);
    if (!kPingPong && last) release(s.pipeline_k.empty[0]);
    if (has_dq) epilogue.stage_unit(dq);
    wgmma_wait<0>();
    wgmma_fence_operand(dk);
    if (releases) release(s.pipeline_q.empty[stage]);
    step_state.advance();
  }
  // With ping-pong, behind the steps of a tile: dQ of the last step for consumer 0.
  TEA_DEVICE void finish_dq() {
    if (is_ahead()) {
      wait_for_other_ds();
      float dq[32];
      gemm_dq(dq, step_state.stage ^ 1);
      wgmma_wait<0>();
      wgmma_fence_operand(dq);
      release(s.pipeline_k.empty[0]);
      epilogue.stage_unit(dq);
    } else {
      release(s.pipeline_k.empty[0]);
    }
  }

  TEA_DEVICE void compute_tile(const WorkTile& w) {
    Gradient dk, dv;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) dk[i] = dv[i] = 0;
    // Otherwise the zeros would be written after the first wgmma has begun, and ptxas would
    // serialise all of them.
    wgmma_fence_operand(dk);
    wgmma_fence_operand(dv);
    wait(s.pipeline_k.full[0], tile_parity);
    wait(s.pipeline_v.full[0], tile_parity);
    if (kPingPong && stores_pending) finish_stores();  // within a step ptxas spills
    const int heads = w.last_head - w.first_head;
    const int steps = heads * (w.row_blocks.end - w.row_blocks.begin);
    const Range unmasked = unmasked_blocks(w);
    int block = w.row_blocks.end - 1, heads_left = heads;
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      const bool masks = block < unmasked.begin || block >= unmasked.end;
      step(dk, dv, w, block, masks, i == 0, i + 1 == steps);
      if (--heads_left == 0) --block, heads_left = heads;
    }
    if constexpr (kPingPong) finish_dq();
    epilogue.store_gradients(dk, dv, w, step_state.stage ^ 1);
    stores_pending = p.stores_by_tma;
    s.work.pipeline.consumer_release(work_state);  // all threads, because all have read it
    work_state.advance();
    tile_parity ^= 1;
  }

  TEA_DEVICE void run() {
    epilogue.start();
    for (;;) {
      const WorkTile& w = s.work.read(work_state);
      if (w.head_kv < 0) break;
      compute_tile(w);
    }
    if (p.stores_by_tma) epilogue.wait_for_stores();  // shared memory ends with the CTA
  }
};

}  // namespace tea::hopper::backward
