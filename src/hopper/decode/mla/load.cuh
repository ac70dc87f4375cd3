// The producer of the MLA kernel: loads blocks of K, and of V unless it is a part of K. One warp
// loads boxes of rows by TMA; where pages do not have whole boxes, four warps gather rows by
// cp.async. Also the load of Q by the consumers.
#pragma once
#include "hopper/decode/mla/shared_memory.cuh"
#include "hopper/row_box.cuh"

namespace tea::hopper::decode::mla {

struct Loader {
  // While a block is loaded, this later one is read into L2: two blocks in shared memory are too
  // few to hide the latency of global memory.
  static constexpr int kPrefetchDistance = 2;
  // A thread gathers a chunk of 16 bytes of each slab, of every kRowStep-th row of a block.
  static constexpr int kSlabChunks = width(kSwizzle) / 16,
                       kRowStep = kProducerThreads / kSlabChunks, kThreadRows = kBlockN / kRowStep;

  const LaunchParams& p;
  SharedStorage& s;
  int number = 0;  // of the next block of the item; see Fill

  // Where a key is, or instead of one behind the end of the sequence, the last one or the last box:
  // such keys are masked, and their values are finite if those of the sequence are.
  struct Place {
    int batch, row;  // or the page, and the row in it
    int keys;        // of the sequence from there on
  };
  TEA_DEVICE const int32_t* page_entry(bool is_v, int row) const {
    const PageTable& table = is_v ? p.args.page_table_v : p.args.page_table_k;
    return table.entries + s.load_work.item.batch * table.stride + row / p.page_size;
  }
  TEA_DEVICE Place place_of(bool is_v, int key) const {
    const AttentionArguments& a = p.args;
    const WorkItem& item = s.load_work.item;
    const int keys = item.bounds.seqlen_kv;
    key = min(key, (keys - 1) >> p.box_rows_log2 << p.box_rows_log2);
    int row = key + item.bounds.start_kv, batch = a.keys.form == TEA_RAGGED ? 0 : item.batch;
    if (a.keys.form == TEA_PAGED) {
      bool valid = true;
      batch = static_cast<int>(clamp_page(*page_entry(is_v, row),
                                          (is_v ? a.page_table_v : a.page_table_k).pages, &valid));
      if (!valid) report_status(a, TEA_STATUS_BAD_PAGE);
      row = row % p.page_size;
    }
    return {batch, row, keys - key};
  }
  TEA_DEVICE int slabs(bool is_v) const {
    return ((is_v ? p.args.dim_v : p.args.dim_qk) + kSlabColumns - 1) / kSlabColumns;
  }
  // Whether a slab, or row, is the tile's share of what the tiles of the same keys read into L2.
  TEA_DEVICE bool prefetches(int i) const { return (i + s.load_work.item.tile) % p.row_tiles == 0; }

  // ------------------------------------------------------------------------------------ boxes

  // Calls do_box(slab, row of the block, map, coordinates) for all boxes of some slabs, each in a
  // lane.
  template <class DoBox>
  TEA_DEVICE void each_box(bool is_v, int first, int end, int block, DoBox&& do_box) const {
    const int boxes_log2 = 6 - p.box_rows_log2;  // of a slab
#pragma unroll 1
    for (int i = lane(); i < (end - first) << boxes_log2; i += 32) {
      const int slab = first + (i >> boxes_log2);
      const int row = (i & ((1 << boxes_log2) - 1)) << p.box_rows_log2;
      const Place at = place_of(is_v, block * kBlockN + row);
      const RowBox box(1 << p.box_rows_log2, at.row, at.keys, p.head_kv(s.load_work.item),
                       at.batch);
      const int coordinates[5] = {slab * kSlabColumns, box.y, box.head, box.z, box.batch};
      do_box(slab, row, is_v ? p.v : p.k, coordinates);
    }
    __syncwarp();
  }
  TEA_DEVICE void load_boxes(int part, bool is_v, const Fill& fill, int block) const {
    const int first = part * kPartSlabs, end = min(first + kPartSlabs, kSlabs),
              own = first + lane();
    if (own < end)
      arrive_and_expect_tx(s.full[fill.buffer][own], own < slabs(is_v) ? kSlabBytes : 0);
    __syncwarp();
    each_box(is_v, first, min(end, slabs(is_v)), block,
             [&](int slab, int row, const TensorMap& map, const int(&at)[5]) {
               tma_load<5>(s.kv[fill.buffer][slab] + row * width(kSwizzle), map,
                           s.full[fill.buffer][slab], at);
             });
  }

  // ----------------------------------------------------------------------------- gathered rows

  static TEA_DEVICE int thread() { return static_cast<int>(threadIdx.x) - kConsumerThreads; }
  // The thread's row i of a block, and the address of its first element.
  static TEA_DEVICE int row_of(int i) { return thread() / kSlabChunks + i * kRowStep; }
  TEA_DEVICE const uint16_t* row_address(bool is_v, int block, int i) const {
    const StridedTensor& x = is_v ? p.args.v : p.args.k;
    const Place at = place_of(is_v, block * kBlockN + row_of(i));
    return static_cast<const uint16_t*>(x.data) + p.head_kv(s.load_work.item) * x.head +
           at.batch * x.batch + at.row * x.seq;
  }
  TEA_DEVICE void gather(int part, bool is_v, const Fill& fill,
                         const uint16_t* const (&rows)[kThreadRows]) const {
    const int first = part * kPartSlabs, end = min(first + kPartSlabs, kSlabs);
    const int chunk = thread() % kSlabChunks;
    const uint32_t offset = swizzled(kSwizzle, row_of(0), chunk * 16);
#pragma unroll 1
    for (int slab = first; slab < end; ++slab) {
      const int column = slab * kSlabColumns + chunk * 8;
      const bool valid = column < (is_v ? p.args.dim_v : p.args.dim_qk);
      const uint32_t to = shared_address(s.kv[fill.buffer][slab]) + offset;
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i)
        cp_async_16(to + i * kRowStep * width(kSwizzle), rows[i] + (valid ? column : 0), valid,
                    CachePolicy::kNormal);
      cp_async_arrive(s.full[fill.buffer][slab]);
    }
  }
  TEA_DEVICE void prefetch_rows(int block) const {
    if (!prefetches(row_of(0))) return;
#pragma unroll 1
    for (int i = 0; i < kThreadRows; ++i) {
      const uint16_t* const row = row_address(false, block, i);
#pragma unroll 1
      for (int slab = thread() % kSlabChunks; slab < slabs(false); slab += kSlabChunks)
        prefetch_l2(row + slab * kSlabColumns);
    }
  }
  // Page table entries into L1.
  TEA_DEVICE void prefetch_pages(bool is_v, int block) const {
    const SequenceBounds& b = s.load_work.item.bounds;
    const int key = block * kBlockN + thread();
    if (thread() < kBlockN && key < b.seqlen_kv) prefetch_l1(page_entry(is_v, key + b.start_kv));
  }

  // ------------------------------------------------------------------------------------- items

  // Loads K or V of a block, the parts in the order in which they are released.
  TEA_DEVICE void load(bool is_v, int n, int block) const {
    const uint16_t* rows[kThreadRows];
    if (p.gathers)
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) rows[i] = row_address(is_v, block, i);
    const auto load_part = [&](int part) {
      const Fill fill(p, n, part, is_v);
      wait(s.empty[fill.buffer][part], fill.parity ^ 1);
      if (p.gathers)
        gather(part, is_v, fill, rows);
      else
        load_boxes(part, is_v, fill, block);
    };
    if (!is_v) load_part(kRest);
    load_part(n % 2);
    load_part(1 - n % 2);
  }
  // Of a block of K that is loaded later.
  TEA_DEVICE void prefetch(int block) const {
    if (p.gathers) {
      prefetch_pages(false, block + 1);
      if (!p.shares_kv) prefetch_pages(true, block + 1);
      if (block < s.load_work.item.end_of_keys()) prefetch_rows(block);
    } else if (block < s.load_work.item.end_of_keys()) {
      each_box(false, 0, slabs(false), block,
               [&](int slab, int, const TensorMap& map, const int(&at)[5]) {
                 if (prefetches(slab)) tma_prefetch(map, at);
               });
    }
  }
  TEA_DEVICE void load_item() {
    const int first = s.load_work.item.first, count = s.load_work.item.end_of_keys() - first;
#pragma unroll 1
    for (int i = 0; i <= count; ++i) {
      if (i < count) {
        load(false, number + i, first + i);
        prefetch(first + i + kPrefetchDistance);
      }
      if (i > 0 && !p.shares_kv) load(true, number + i - 1, first + i - 1);
    }
    number += count;
  }
  TEA_DEVICE void sync() const {
    if (p.gathers)
      named_barrier_sync(kProducerBarrier, kProducerThreads);
    else
      __syncwarp();
  }
  TEA_DEVICE void run(const WorkCursor<kBlockShape>& first) {
    if (thread() == 0) s.load_work = first;
    for (;;) {
      sync();
      load_item();
      if (s.load_work.remaining == 0) return;
      sync();  // all threads have read the item
      if (thread() == 0) s.load_work.next(p);
    }
  }
};

// Loads the packed rows of a tile of Q. Called by all consumer threads.
TEA_DEVICE void load_q(const LaunchParams& p, SharedStorage& s) {
  constexpr int kChunks = kDim / 8;  // of 16 bytes
  const AttentionArguments& a = p.args;
  const WorkItem& item = s.work.item;
  const int rows = item.bounds.seqlen_q * p.group, first_row = p.first_row(item);
  const int first_head = p.head_kv(item) * p.group;
  const int64_t first =
      a.queries.form == TEA_RAGGED ? item.bounds.start_q * a.q.seq : item.batch * a.q.batch;
#pragma unroll 3
  for (int i = static_cast<int>(threadIdx.x); i < kBlockM * kChunks; i += kConsumerThreads) {
    const int row = i / kChunks, chunk = i % kChunks, packed = first_row + row;
    const bool valid = packed < rows && chunk * 8 < a.dim_qk;
    const int query = packed / p.group, head = first_head + packed % p.group;
    const int64_t at = valid ? first + query * a.q.seq + head * a.q.head + chunk * 8 : 0;
    cp_async_16(shared_address(s.q[chunk / 8]) + swizzled(kSwizzle, row, chunk % 8 * 16),
                static_cast<const uint16_t*>(a.q.data) + at, valid, CachePolicy::kNormal);
  }
  cp_async_commit();
  cp_async_wait<0>();
  fence_proxy_async();  // wgmma reads it
}

}  // namespace tea::hopper::decode::mla
