// The store warps, which take pairs of units from the staging buffers alternately: they add dQ of
// each step to global memory in the order of the key blocks, and dV and dK in the order of the
// parts if several tiles share a key block. Units that have received their last contribution are
// converted elsewhere (postprocess.cuh).
#pragma once
#include "hopper/backward/epilogue.cuh"
#include "hopper/device/ordered_sum.cuh"

namespace tea::hopper::backward {

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
  // Waits until both units of the head that had this memory before have been read.
  TEA_DEVICE void wait_for_conversion(const uint32_t& converted) {
    while (load_acquire(converted) < 2) {
    }
  }
  // Adds a pair of units, adjacent in memory from `sums` on, as contribution `rank` of `count`; of
  // the second one kSecondBytes. completed() describes their conversion.
  template <uint32_t kSecondBytes, class Completed>
  TEA_DEVICE void add_pair(float* sums, uint32_t* order, int rank, int count,
                           Completed&& completed) {
    wait_for_turn(*order, static_cast<uint32_t>(rank));
    wait_for_pair();
    fence_proxy_async_global();
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // the unit of consumer i ^ kFirstStaging, which has that place
      const float* const from = reinterpret_cast<const float*>(s.staging[state[i].stage]);
      const int unit = i ^ T::kFirstStaging;
      const uint32_t bytes = unit == 0 ? kUnitBytes : kSecondBytes;
      if (rank == 0)
        bulk_store(sums + unit * kUnitFloats, from, bytes);
      else
        bulk_reduce_add(sums + unit * kUnitFloats, from, bytes);
    }
    bulk_commit();
    bulk_wait_read<0>();
    release_pair();  // read, though not added yet: the consumers need not wait for that
    bulk_wait<0>();
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
    if (pair >= queue.capacity) return;  // sequences overlap, as invalid metadata can say
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
    const int rank = w.rank_among(keys);
    int64_t place = pair;
    uint32_t* converted = nullptr;
    if (p.work.dq_heads) {
      const int own = p.work.dq_heads, n = w.batch * a.heads_q + head, first = n - own;
      place = int64_t{first < 0 ? n : first} * p.work.row_blocks.of_dense + block;
      if (first >= 0 && rank == 0) wait_for_conversion(p.work.dq_converted[place]);
      if (n < static_cast<int>(a.batch) * a.heads_q - own) converted = p.work.dq_converted + place;
    }
    float* const sums = p.work.dq + place * dq_pair_floats(C.tile);
    add_pair<4 * second_unit_floats(C.tile)>(
        sums, p.work.dq_order + pair, rank, keys.end - keys.begin, [&] {
          const int64_t at = T::batch_of(a.queries, w) * a.dq.batch + head * a.dq.head +
                             int64_t{w.start_q + row} * a.dq.seq;
          return CompletedPair{.from = sums,
                               .to = element(a.dq, at),
                               .row_stride = a.dq.seq,
                               .rows = w.rows - row,
                               .columns = a.dim_qk,
                               .factor = a.scale,
                               .by_rows = kBlockM == 128,
                               .adds = (a.accumulate & TEA_ACCUMULATE_ROWS) != 0,
                               .converted = converted};
        });
  }
  // Adds 64 columns of dV or dK: unit `unit` of both, dV's first.
  TEA_DEVICE void add_gradient(const WorkTile& w, const StridedTensor& x, int dim, float factor,
                               int unit, int column) {
    if (!take_pair()) return;
    const int64_t block = w.head_kv * p.work.key_blocks.per_head + w.key_block + w.key_block_index;
    const int64_t pair = block * (2 * T::kUnitsPerTensor) + unit;
    float* const sums = p.work.dkv + pair * (2 * kUnitFloats);
    add_pair<kUnitBytes>(sums, p.work.dkv_order + pair, w.part, p.parts, [&] {
      const int64_t at = T::batch_of(p.args.keys, w) * x.batch + w.head_kv * x.head +
                         int64_t{w.start_kv + w.first_key} * x.seq + column;
      return CompletedPair{.from = sums,
                           .to = element(x, at),
                           .row_stride = x.seq,
                           .rows = w.keys - w.first_key,
                           .columns = dim - column,
                           .factor = factor,
                           .by_rows = true,
                           .adds = (p.args.accumulate & TEA_ACCUMULATE_KEYS) != 0,
                           .converted = nullptr};
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
