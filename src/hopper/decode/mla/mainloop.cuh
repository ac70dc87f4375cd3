// The mainloop of a consumer warpgroup of the MLA kernel. O has 64 rows by 512 columns, of which
// each consumer has half; the consumers alternate in computing the scores of a block. A consumer
// does for a block n of its own:
//
//   S(n) = Q K(n)^T begun | O += P(n - 1) V(n - 1), S(n) ended | softmax(S(n)) | O += P(n) V(n)
//
// where P(n - 1) comes from the other consumer through shared memory. While one consumer waits for
// its products or computes a softmax, the other has the tensor cores (FlashMLA: seesaw scheduling).
#pragma once
#include "hopper/decode/mla/load.cuh"
#include "hopper/device/wgmma.cuh"

namespace tea::hopper::decode::mla {

TEA_DEVICE void sync_consumers() { named_barrier_sync(kConsumerBarrier, kConsumerThreads); }

template <Type kType, bool kSharedKvBoxes>
struct Mainloop {
  static constexpr WgmmaShape kShapeS = {kBlockN, kType, kType};
  // O += P V is issued for so many slabs of V at a time. Each group is released when its products
  // are complete, so that K of the next block but one arrives while the others are computed.
  static constexpr int kGroupSlabs = 2, kGroups = kPartSlabs / kGroupSlabs;
  static constexpr WgmmaShape kShapeO = {kGroupSlabs * kSlabColumns, kType, kType, Major::kK,
                                         Major::kMN};
  static_assert(kGroups == 2);

  const LaunchParams& p;
  SharedStorage& s;
  const int consumer = __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 128, 0);
  int number = 0;  // of the item's first block; see Fill

  float o[kColumns / 2];
  OnlineSoftmax softmax;  // the sums of this consumer's blocks

  TEA_DEVICE void start_item() {
    softmax.start();
#pragma unroll
    for (float& x : o) x = 0;
  }
  // The row in the tile of the thread's row r.
  static TEA_DEVICE int tile_row(int r) { return accumulator_row(2 * r); }
  // Among the packed rows; instead of rows past the last one, the last one.
  TEA_DEVICE int packed_row(int r) const {
    const WorkItem& item = s.work.item;
    return min(p.first_row(item) + tile_row(r), item.bounds.seqlen_q * p.group - 1);
  }

  // One thread of each warp arrives for each slab.
  TEA_DEVICE void release(int slab, int count, int n) const {
    if (lane() < count) arrive(s.empty[n % 2][slab + lane()]);
  }
  TEA_DEVICE void wait_for_slab(int slab, const Fill& fill) const {
    wait(s.full[fill.buffer][slab], fill.parity);
    if (gathers<kSharedKvBoxes>(p)) fence_proxy_async();  // cp.async has written the slab
  }
  TEA_DEVICE void wait_for_v(int part, int n) const {
    const Fill fill(shares_kv<kSharedKvBoxes>(p), n, part, true);
#pragma unroll
    for (int i = 0; i < kPartSlabs; ++i) wait_for_slab(part * kPartSlabs + i, fill);
  }

  // Issues the products of the slabs of a part as they arrive.
  template <int kCount, bool kAccumulate>
  TEA_DEVICE void gemm_part(float (&scores)[kBlockN / 2], int n, int part) const {
    const int first = part * kPartSlabs;
    const Fill fill(shares_kv<kSharedKvBoxes>(p), n, part, false);
    const uint64_t a = make_descriptor(s.q[first], kSwizzle);
    const uint64_t b = make_descriptor(s.kv[n % 2][first], kSwizzle);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      wait_for_slab(first + i, fill);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kSlabColumns / 16; ++k) {
        const int at = i * kSlabBytes + k * 32;
        wgmma<kShapeS>(scores, advance_descriptor(a, at), advance_descriptor(b, at),
                       kAccumulate || i > 0 || k > 0);
      }
    }
  }
  // The part of K's columns that only K has, and the consumer's own; they arrive first.
  TEA_DEVICE void issue_first_scores(float (&scores)[kBlockN / 2], int n) const {
    gemm_part<kSlabs - kRest * kPartSlabs, false>(scores, n, kRest);
    gemm_part<kPartSlabs, true>(scores, n, consumer);
    wgmma_commit();
  }
  TEA_DEVICE void finish_scores(float (&scores)[kBlockN / 2], int n) const {
    wgmma_wait<0>();
    wgmma_fence_operand(scores);
    if (shares_kv<kSharedKvBoxes>(p))
      release(kRest * kPartSlabs, kSlabs - kRest * kPartSlabs, n);
    else
      release(0, kSlabs, n);
  }

  // Issues O += P V, a group of slabs at a time. p_operand(k): 16 columns of P.
  template <class POperand>
  TEA_DEVICE void issue_pv(int n, POperand&& p_operand) {
    const uint64_t b = make_descriptor(s.kv[n % 2][consumer * kPartSlabs], kSwizzle, kSlabBytes);
    wgmma_fence_operand(o);
    wgmma_fence();
#pragma unroll
    for (int slab = 0; slab < kPartSlabs; slab += kGroupSlabs) {
      auto& columns = reinterpret_cast<float(&)[kShapeO.n / 2]>(o[slab * kSlabColumns / 2]);
#pragma unroll
      for (int k = 0; k < kBlockN / 16; ++k)
        wgmma<kShapeO>(columns, p_operand(k),
                       advance_descriptor(b, slab * kSlabBytes + k * 16 * width(kSwizzle)), true);
      wgmma_commit();
    }
  }
  // Releases the first group when at most one later group of products is in flight.
  TEA_DEVICE void release_first_group(int n) {
    wgmma_wait<1>();
    release(consumer * kPartSlabs, kGroupSlabs, n);
  }
  template <int kPending>
  TEA_DEVICE void release_last_group(int n) {
    wgmma_wait<kPending>();
    wgmma_fence_operand(o);
    release(consumer * kPartSlabs + kGroupSlabs, kGroupSlabs, n);
  }
  TEA_DEVICE void wait_pv(int n) {
    release_first_group(n);
    release_last_group<0>(n);
  }
  TEA_DEVICE void rescale_o(const float (&rescale)[2]) {
    if (__any_sync(0xffffffff, rescale[0] != 1 || rescale[1] != 1)) scale_rows(o, rescale);
  }

  // Begins O += P V of the other consumer's block: takes over the maximum of each row.
  TEA_DEVICE void begin_other_block(int n) {
    named_barrier_sync(kProbabilitiesBarrier + n % 2, kConsumerThreads);
    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rescale[r] = s.rescale[tile_row(r)];
      softmax.row_max[r] = s.row_max[tile_row(r)];
      softmax.row_sum[r] *= rescale[r];
    }
    rescale_o(rescale);
    wait_for_v(consumer, n);
    const uint64_t a = make_descriptor(s.p, kSwizzle);
    issue_pv(n, [&](int k) { return advance_descriptor(a, 32 * k); });
  }
  // Replaces scores by unnormalised P.
  TEA_DEVICE void update(float (&scores)[kBlockN / 2], int block, float (&rescale)[2]) {
    const SequenceBounds& b = s.work.item.bounds;
    const int key = block * kBlockN;
    float highest[2];
    if (key < b.seqlen_q - 1 + b.lo || key + kBlockN > min(b.hi + 1, b.seqlen_kv)) {
      uint32_t visible[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int query = packed_row(r) / p.group;
        visible[r] =
            column_mask<kBlockN>(query + b.lo - key, min(query + b.hi + 1, b.seqlen_kv) - key);
      }
      mask_columns(scores, visible);
    }
    thread_row_max(scores, highest);
    softmax.update(scores, highest, p.scale_log2, rescale);
  }
  // Hands P and the maxima of its rows to the other consumer.
  TEA_DEVICE void publish(const float (&scores)[kBlockN / 2], const float (&rescale)[2], int n) {
    store_tile<kType>(SharedTile{s.p, kSwizzle, kBlockM}, 0, scores);
    if (lane() % 4 == 0)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        s.row_max[tile_row(r)] = softmax.row_max[r];
        s.rescale[tile_row(r)] = rescale[r];
      }
    fence_proxy_async();
    named_barrier_arrive(kProbabilitiesBarrier + n % 2, kConsumerThreads);
  }
  // A block n of this consumer, and the P V of the block before.
  template <bool kHasOther>
  TEA_DEVICE void own_block(int n, int block) {
    float scores[kBlockN / 2], rescale[2];
    uint32_t probabilities[kBlockN / 16][4];
    issue_first_scores(scores, n);
    if constexpr (kHasOther) {
      begin_other_block(n - 1);
      release_first_group(n - 1);
    }
    gemm_part<kPartSlabs, true>(scores, n, 1 - consumer);
    wgmma_commit();
    if constexpr (kHasOther) release_last_group<1>(n - 1);
    finish_scores(scores, n);
    update(scores, block, rescale);
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k)
      accumulator_as_operand<kType>(probabilities[k], scores, k);
    // P of the block before is overwritten, which other warps' products read.
    if constexpr (kHasOther) named_barrier_sync(kWarpgroupBarrier + consumer, 128);
    // K of the next block but one has the same parity as K of this one: both halves of V are waited
    // for in between, before the other consumer can release its own.
    if (!shares_kv<kSharedKvBoxes>(p)) wait_for_v(1 - consumer, n);
    publish(scores, rescale, n);
    rescale_o(rescale);
    if (!shares_kv<kSharedKvBoxes>(p)) wait_for_v(consumer, n);  // otherwise K has been waited for
    issue_pv(n, [&](int k) -> const uint32_t(&)[4] { return probabilities[k]; });
    wait_pv(n);
  }

  TEA_DEVICE void run() {
    const WorkItem& item = s.work.item;
    // From the first lane, so that the compiler knows that all lanes have the same number.
    const auto uniform = [](int x) { return __shfl_sync(0xffffffff, x, 0); };
    const int first = uniform(item.first - number);  // the block with number 0
    const int end = uniform(item.end_of_keys()) - first;
    int n = number;
    if ((n ^ consumer) & 1) {
      ++n;
    } else if (n < end) {
      own_block<false>(n, first + n);
      n += 2;
    }
#pragma unroll 1
    for (; n < end; n += 2) own_block<true>(n, first + n);
    if (end > number && ((end - 1) ^ consumer) & 1) {
      begin_other_block(end - 1);
      wait_pv(end - 1);
    }
    number = end;
  }
};

}  // namespace tea::hopper::decode::mla
