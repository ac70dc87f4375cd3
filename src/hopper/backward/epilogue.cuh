// The outputs of the consumers, which hand units of dQ to the store warps (store_warp.cuh) through
// staging buffers, in pairs: one buffer of each consumer. dV and dK are stored at the end of a
// tile, by TMA or, in fp32, by the consumers themselves, unless several tiles share the key block:
// then they go to the store warps too.
#pragma once
#include "hopper/backward/load.cuh"
#include "hopper/device/accumulator.cuh"

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

template <KernelConfig C>
struct Epilogue {
  using T = Traits<C>;

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
  // The consumers pass a barrier before every unit: in a step one of dS, here this one. The
  // previous use of a buffer is the other consumer's, and acquire() names only the parity of its
  // release: it would return at once if this consumer's own use before that one were not released
  // yet. After the barrier it is, because the other consumer has acquired the buffer since.
  // test_staging.cpp tries every order of the warps.
  template <int kFirst = 0>
  TEA_DEVICE void stage_gradient(const Gradient& x) {
    named_barrier_sync(BarrierId::kStaging, 128 * T::kConsumers);
    stage_unit<kFirst>(x);
  }
  // Stores dV and dK of this consumer's keys, or stages them if several tiles share the key block.
  // `stage`: of Q and dO in the tile's last step.
  TEA_DEVICE void store_gradients(const Gradient& dk, const Gradient& dv, const WorkTile& w,
                                  int stage) {
    const AttentionArguments& a = p.args;
    if (p.stores_by_tma) {
      named_barrier_sync(BarrierId::kStaging, 128 * T::kConsumers);  // both have read the operands
      stage_slabs(dv, dv_slabs(stage), a.dim_v, 1.0f);
      stage_slabs(dk, dk_slabs(stage), a.dim_qk, a.scale);
      store_by_tma(w, stage);
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
  // Waits until TMA has read the staged slabs: their memory may be written again.
  TEA_DEVICE void wait_for_stores() {
    if (threadIdx.x % 128 == 0) bulk_wait_read<0>();
    named_barrier_sync(BarrierId::kOwn + consumer, 128);
  }
  // Where a consumer stages dV and dK for TMA, in slabs of 64 keys: consumer 0 has dV in its
  // columns of dS, and dK in the stage of Q of the tile's last step; consumer 1 has dK in its
  // columns of dS, and dV in the stage of dO. dK takes that of Q, and dV that of dO, because these
  // have as many slabs, which the next load overwrites: those beyond the head dimension must stay
  // zero.
  struct OutputSlabs {
    uint8_t* first;
    int group_bytes;  // between groups of kOutputSlabsPerStage slabs, which one stage of dS holds
    TEA_DEVICE uint8_t* operator[](int i) const {
      return first + i / T::kOutputSlabsPerStage * group_bytes +
             i % T::kOutputSlabsPerStage * T::kOutputSlabBytes;
    }
  };
  TEA_DEVICE OutputSlabs output_slabs(bool in_ds, uint8_t* operand) const {
    if (in_ds) return {s.ds[0] + consumer * T::kDsSlabBytes, sizeof s.ds[0]};
    return {operand, T::kOutputSlabsPerStage * T::kOutputSlabBytes};
  }
  TEA_DEVICE OutputSlabs dv_slabs(int stage) const {
    return output_slabs(consumer == 0, s.dout[stage]);
  }
  TEA_DEVICE OutputSlabs dk_slabs(int stage) const {
    return output_slabs(consumer == 1, s.q[stage]);
  }
  // Stages dV or dK of this consumer's keys.
  TEA_DEVICE void stage_slabs(const Gradient& x, const OutputSlabs& to, int dim, float factor) {
    const uint32_t thread = reread_thread(), row = thread % 128 / 32 * 16 + thread % 16;
#pragma unroll
    for (int c = 0; c < T::kDim / 16; ++c) {
      const int slab = c * 32 / T::kSlabBytes, at = c * 32 % T::kSlabBytes;
      if (slab * T::kSlabDim >= dim) break;
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[i] = pack<C.type>(x[8 * c + 2 * i] * factor, x[8 * c + 2 * i + 1] * factor);
      stmatrix_x4(shared_address(to[slab]) + swizzled(T::kSwizzle, row, at + thread % 32 / 16 * 16),
                  a);
    }
  }
  // One thread stores what the consumer has staged.
  TEA_DEVICE void store_by_tma(const WorkTile& w, int stage) {
    fence_proxy_async();  // by each writing thread, before the barrier that lets TMA read
    named_barrier_sync(BarrierId::kOwn + consumer, 128);
    const int key = w.first_key + 64 * consumer;
    if (threadIdx.x % 128 || key >= w.keys) return;
    const RowBox b = {64, w.start_kv + key, w.keys - key, w.head_kv, T::batch_of(p.args.keys, w)};
    const auto store = [&](const TensorMap& map, const OutputSlabs& from, int dim) {
#pragma unroll
      for (int slab = 0; slab < T::kSlabs; ++slab)
        if (slab * T::kSlabDim < dim)
          tma_store<5>(map, from[slab], {slab * T::kSlabDim, b.y, b.head, b.z, b.batch});
    };
    store(p.dv, dv_slabs(stage), p.args.dim_v);
    store(p.dk, dk_slabs(stage), p.args.dim_qk);
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

}  // namespace tea::hopper::backward
