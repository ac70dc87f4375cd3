// The outputs of a CTA. Consumers hand units of dQ to the store warps through staging buffers, in
// pairs: one buffer of each consumer. The store warps, which take pairs alternately, add the units
// to global memory in the order of the key blocks. dV and dK are stored at the end of a tile, by
// TMA or, in fp32, by the consumers, unless several tiles share the key block: then these too are
// added, in the order of the parts. Units that have received their last contribution are converted
// elsewhere (postprocess.cuh).
#pragma once
#include "hopper/backward/load.cuh"
#include "hopper/device/accumulator.cuh"
#include "hopper/device/ordered_sum.cuh"

namespace tea::hopper::backward {

// Writes two gradients in fp32, or adds them to those that are there. A reduction needs no
// registers for the latter. Each element is added to once in a run: the order does not matter.
TEA_DEVICE void write_pair(float* to, float x, float y, bool adds) {
  if (adds)
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};\n" ::"l"(to), "f"(x), "f"(y)
                 : "memory");
  else
    *reinterpret_cast<float2*>(to) = {x, y};
}

// Named barriers. kDs and kOwn are two: of each consumer.
enum BarrierId { kDs = 1, kOwn = 3, kStaging = 5 };

// The consumers' side.
template <KernelConfig C>
struct Epilogue {
  using T = Traits<C>;
  static constexpr bool kBothFit = T::kSlabs <= T::kOutputSlabsPerStage;  // dV and dK

  const KernelParams& p;
  typename T::SharedStorage& s;
  const int consumer;
  const bool elected = elect_one();  // the thread that arrives for its warp
  PipelineState<T::kStagingStages> state{};
  using Gradient = float[T::kDim / 2];

  // The staging buffers are used by the consumers alternately.
  TEA_DEVICE void start() {
    if (consumer != T::kFirstStaging) state.advance();
  }
  TEA_DEVICE uint8_t* acquire() {
    s.pipeline_staging.producer_acquire(state);
    return s.staging[state.stage];
  }
  TEA_DEVICE void publish() {
    fence_proxy_async();  // by each writing thread, before the barrier that lets TMA read
    __syncwarp();
    if (elected) arrive(s.pipeline_staging.full[state.stage]);
    state.advance();
    state.advance();
  }
  // Stages 64 x 64 sums: elements kFirst to kFirst + 31 of an accumulator, zeros where it has
  // fewer.
  template <int kFirst = 0, int kCount>
  TEA_DEVICE void stage_unit(const float (&x)[kCount]) {
    float4* const to = reinterpret_cast<float4*>(acquire()) + threadIdx.x % 128;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int i = kFirst + 4 * j;
      to[128 * j] = i < kCount ? float4{x[i], x[i + 1], x[i + 2], x[i + 3]} : float4{};
    }
    publish();
  }
  // The consumers pass a barrier before every unit: in a step one of dS, here this one. The use
  // of a buffer before is the other consumer's, and acquire() names only the parity of its release:
  // it would return at once if this consumer's own use before that were not released yet. After the
  // barrier that one is, because the other consumer has acquired the buffer since.
  // test_staging.cpp tries every order of the warps.
  template <int kFirst = 0>
  TEA_DEVICE void stage_gradient(const Gradient& x) {
    named_barrier_sync(BarrierId::kStaging, 128 * T::kConsumers);
    stage_unit<kFirst>(x);
  }
  // Stores dV and dK of this consumer's keys, or stages them if several tiles share the key block.
  TEA_DEVICE void store_gradients(const Gradient& dk, const Gradient& dv, const WorkTile& w) {
    const AttentionArguments& a = p.args;
    if (p.stores_by_tma) {
      named_barrier_sync(BarrierId::kStaging, 128 * T::kConsumers);  // both have finished with dS
      store_by_tma(dv, 0, p.dv, w, a.dim_v, 1.0f);
      if constexpr (!kBothFit) wait_for_stores();
      store_by_tma(dk, kBothFit ? T::kSlabs : 0, p.dk, w, a.dim_qk, a.scale);
    } else {
      store_gradient(dv, w, a.dv, a.dim_v, 1.0f);
      store_gradient(dk, w, a.dk, a.dim_qk, a.scale);
    }
  }
  TEA_DEVICE void store_gradient(const Gradient& x, const WorkTile& w, const StridedTensor& to,
                                 int dim, float factor) {
    if (p.parts > 1) {
      stage_gradient(x);
      if constexpr (T::kUnitsPerTensor == 2) stage_gradient<32>(x);
    } else {
#pragma unroll
      for (int r = 0; r < 2; ++r) store_fp32_row(x, w, to, dim, factor, r);
    }
  }
  // Slab i of those that a consumer stages for TMA, where its columns of dS were.
  TEA_DEVICE uint8_t* output_slab(int i) {
    return s.ds[i / T::kOutputSlabsPerStage] + consumer * T::kDsSlabBytes +
           i % T::kOutputSlabsPerStage * T::kOutputSlabBytes;
  }
  // Until the staged slabs have been read: their memory may be written again.
  TEA_DEVICE void wait_for_stores() {
    if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
    named_barrier_sync(BarrierId::kOwn + consumer, 128);
  }
  // Stages dV or dK of this consumer's keys in slabs from `first_slab` on, which one thread stores.
  TEA_DEVICE void store_by_tma(const Gradient& x, int first_slab, const TensorMap& map,
                               const WorkTile& w, int dim, float factor) {
    const uint32_t thread = reread_thread(), row = thread % 128 / 32 * 16 + thread % 16;
#pragma unroll
    for (int c = 0; c < T::kDim / 16; ++c) {
      const int slab = c * 32 / T::kSlabBytes, at = c * 32 % T::kSlabBytes;
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[i] = pack<C.type>(x[8 * c + 2 * i] * factor, x[8 * c + 2 * i + 1] * factor);
      stmatrix_x4(shared_address(output_slab(first_slab + slab)) +
                      swizzled(T::kSwizzle, row, at + thread % 32 / 16 * 16),
                  a);
    }
    fence_proxy_async();  // by each writing thread, before the barrier that lets TMA read
    named_barrier_sync(BarrierId::kOwn + consumer, 128);
    const int key = w.first_key + 64 * consumer;
    if (threadIdx.x % 128 || key >= w.keys) return;
    const RowBox b = {64, w.start_kv + key, w.keys - key, w.head_kv, T::batch_of(p.args.keys, w)};
#pragma unroll
    for (int slab = 0; slab < T::kSlabs; ++slab)
      if (slab * T::kSlabDim < dim)
        tma_store<5>(map, output_slab(first_slab + slab),
                     {slab * T::kSlabDim, b.y, b.head, b.z, b.batch});
    bulk_commit();
  }
  // The offset of the thread's row in dV or dK.
  TEA_DEVICE int64_t row_offset(const WorkTile& w, const StridedTensor& to, int key) {
    return T::batch_of(p.args.keys, w) * to.batch + w.head_kv * to.head +
           int64_t{w.start_kv + key} * to.seq;
  }
  // One of the thread's rows in fp32: a quad has eight columns, which are a sector.
  TEA_DEVICE void store_fp32_row(const Gradient& x, const WorkTile& w, const StridedTensor& to,
                                 int dim, float factor, int r) {
    const int key = w.first_key + 64 * consumer + reread_accumulator_origin().row + 8 * r;
    float* const row = static_cast<float*>(to.data) + row_offset(w, to, key) + lane() % 4 * 2;
    if (key >= w.keys) return;
#pragma unroll
    for (int n = 0; n < T::kDim / 8; ++n)
      if (8 * n < dim)
        write_pair(row + 8 * n, x[4 * n + 2 * r] * factor, x[4 * n + 2 * r + 1] * factor,
                   p.args.accumulate & TEA_ACCUMULATE_KEYS);
  }
};

// One of the store warps. Run by one thread.
template <KernelConfig C>
struct StoreWarp {
  using T = Traits<C>;
  static constexpr int kBlockM = T::kBlockM;

  const KernelParams& p;
  typename T::SharedStorage& s;
  const int number;
  bool mine = number == 0;  // whether the next pair is this warp's
  PipelineState<2> work_state{};
  PipelineState<T::kStagingStages> state[2] = {{0, 0}, {1, 0}};  // of the next pair

  // Returns whether the next pair is this warp's; otherwise skips it.
  TEA_DEVICE bool take_pair() {
    mine = !mine;
    if (mine) advance();
    return !mine;
  }
  TEA_DEVICE void advance() {
#pragma unroll
    for (int i = 0; i < 2; ++i) state[i].advance(), state[i].advance();
  }
  TEA_DEVICE void wait_for_pair() {
    s.pipeline_staging.consumer_wait(state[0]);
    s.pipeline_staging.consumer_wait(state[1]);
  }
  TEA_DEVICE void release_pair() {
    s.pipeline_staging.consumer_release(state[0]);
    s.pipeline_staging.consumer_release(state[1]);
    advance();
  }
  TEA_DEVICE void wait_for_turn(const uint32_t& order, uint32_t rank) {
    if (rank > 0)
      while (load_acquire(order) < rank) {
      }
  }
  // Adds a pair of units, adjacent in memory from `sums` on, as contribution `rank` of `count`.
  // completed() describes their conversion.
  template <class Completed>
  TEA_DEVICE void add_pair(float* sums, uint32_t* order, int rank, int count,
                           Completed&& completed) {
    wait_for_turn(*order, static_cast<uint32_t>(rank));
    wait_for_pair();
    fence_proxy_async_global();
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // the unit of consumer i ^ kFirstStaging, which has that place
      const float* const from = reinterpret_cast<const float*>(s.staging[state[i].stage]);
      if (rank == 0)
        bulk_store(sums + (i ^ T::kFirstStaging) * kUnitFloats, from, kUnitBytes);
      else
        bulk_reduce_add(sums + (i ^ T::kFirstStaging) * kUnitFloats, from, kUnitBytes);
    }
    bulk_commit();
    bulk_wait<0>();
    release_pair();
    fence_proxy_async_global();
    if (rank + 1 < count)
      add_release(*order, 1);
    else
      complete(completed);
  }
  template <class Completed>
  TEA_DEVICE void complete(Completed&& completed) {
    const CompletedQueue& queue = p.work.completed;
    const uint32_t pair = fetch_add(*queue.tail, 1);
    queue.pairs[pair] = completed();
    add_release(queue.published[pair], 1);
  }

  static TEA_DEVICE void* element(const StridedTensor& x, int64_t at) {
    return static_cast<char*>(x.data) + at * (x.dtype == TEA_FP32 ? 4 : 2);
  }
  TEA_DEVICE void add_dq(const WorkTile& w, int head, int block) {
    if (!take_pair()) return;
    const AttentionArguments& a = p.args;
    const int row = block * kBlockM;
    const Range keys = w.visible_key_blocks(row, kBlockM);
    const int64_t pair = head * p.work.row_blocks.per_head + w.row_block + block;
    float* const sums = p.work.dq + pair * (2 * kUnitFloats);
    add_pair(sums, p.work.dq_order + pair, w.rank_among(keys), keys.end - keys.begin, [&] {
      const int64_t at = T::batch_of(a.queries, w) * a.dq.batch + head * a.dq.head +
                         int64_t{w.start_q + row} * a.dq.seq;
      return CompletedPair{.from = sums,
                           .to = element(a.dq, at),
                           .row_stride = a.dq.seq,
                           .rows = w.rows - row,
                           .columns = a.dim_qk,
                           .factor = a.scale,
                           .by_rows = kBlockM == 128,
                           .adds = (a.accumulate & TEA_ACCUMULATE_ROWS) != 0};
    });
  }
  // Adds 64 columns of dV or dK: unit `unit` of both, dV's first.
  TEA_DEVICE void add_gradient(const WorkTile& w, const StridedTensor& x, int dim, float factor,
                               int unit, int column) {
    if (!take_pair()) return;
    const int64_t block = w.head_kv * p.work.key_blocks.per_head + w.key_block + w.key_block_index;
    const int64_t pair = block * (2 * T::kUnitsPerTensor) + unit;
    float* const sums = p.work.dkv + pair * (2 * kUnitFloats);
    add_pair(sums, p.work.dkv_order + pair, w.part, p.parts, [&] {
      const int64_t at = T::batch_of(p.args.keys, w) * x.batch + w.head_kv * x.head +
                         int64_t{w.start_kv + w.first_key} * x.seq + column;
      return CompletedPair{.from = sums,
                           .to = element(x, at),
                           .row_stride = x.seq,
                           .rows = w.keys - w.first_key,
                           .columns = dim - column,
                           .factor = factor,
                           .by_rows = true,
                           .adds = (p.args.accumulate & TEA_ACCUMULATE_KEYS) != 0};
    });
  }
  TEA_DEVICE void add_gradients(const WorkTile& w) {
    const AttentionArguments& a = p.args;
    if (p.parts == 1) return;  // the consumers store them
#pragma unroll 1
    for (int unit = 0; unit < 2 * T::kUnitsPerTensor; ++unit) {
      const bool is_v = unit < T::kUnitsPerTensor;
      add_gradient(w, is_v ? a.dv : a.dk, is_v ? a.dim_v : a.dim_qk, is_v ? 1.0f : a.scale, unit,
                   unit % T::kUnitsPerTensor * 64);
    }
  }
  TEA_DEVICE void run() {
    for (;;) {
      const WorkTile& w = s.work.read(work_state);
      if (w.head_kv < 0) break;
      for (int block = w.row_blocks.end - 1; block >= w.row_blocks.begin; --block)
        for (int head = w.first_head; head < w.last_head; ++head) add_dq(w, head, block);
      add_gradients(w);
      add_release(*p.work.completed.finished, 1);
      s.work.pipeline.consumer_release(work_state);
      work_state.advance();
    }
    bulk_wait<0>();  // nothing is pending, but without this code here ptxas spills registers
  }
};

}  // namespace tea::hopper::backward
