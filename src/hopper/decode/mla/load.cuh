// The producer of the MLA kernel, four warps: loads blocks of K, and of V unless it is a part of
// K. Each warp loads a slab of each part by TMA, in boxes of rows; where pages do not have whole
// boxes, all gather rows by cp.async. Also the load of Q by the consumers.
#pragma once
#include "hopper/decode/mla/shared_memory.cuh"
#include "hopper/pages.cuh"
#include "hopper/row_box.cuh"

namespace tea::hopper::decode::mla {

template <bool kSharedKvBoxes>
struct Loader {
  // While a block is loaded, this later one is found in the page table.
  static constexpr int kFindDistance = 2;
  // A thread gathers a chunk of 16 bytes of each slab, of every kRowStep-th row of a block.
  static constexpr int kSlabChunks = width(kSwizzle) / 16,
                       kRowStep = kProducerThreads / kSlabChunks, kThreadRows = kBlockN / kRowStep;

  static constexpr int kMaxBoxes = kBlockN / kMinBoxRows;  // of a slab

  const LaunchParams& p;
  SharedStorage& s;
  const int warp = __shfl_sync(0xffffffff, thread() / 32, 0);  // of the producer
  int number = 0;  // of the next block of the item; see Fill
  int head = 0;    // of K and V, of the item

  // Where a key is, or instead of one past the end of the sequence, the last one or the last box:
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
      batch = page_of(a, *page_entry(is_v, row), (is_v ? a.page_table_v : a.page_table_k).pages);
      row = row % p.page_size;
    }
    return {batch, row, keys - key};
  }
  TEA_DEVICE int slabs(bool is_v) const {
    return ((is_v ? p.args.dim_v : p.args.dim_qk) + kSlabColumns - 1) / kSlabColumns;
  }

  // ------------------------------------------------------------------------------------ boxes

  // Where a box of rows of a block is, in every slab: lane l has box l % boxes().
  struct Box {
    int y, z, batch;
  };
  TEA_DEVICE int boxes() const { return kBlockN >> p.box_rows_log2; }
  TEA_DEVICE Box box_of(bool is_v, int block) const {
    const int row = (lane() & (boxes() - 1)) << p.box_rows_log2;
    const Place at = place_of(is_v, block * kBlockN + row);
    const RowBox box(1 << p.box_rows_log2, at.row, at.keys, 0, at.batch);
    return {box.y, box.z, box.batch};
  }
  // The boxes of a block in every lane, because TMA takes its operands from uniform registers,
  // which lanes would fill one after the other. Coordinates are computed before the wait for a
  // slab, because the buffer is idle from its release until the load is issued.
  template <int kBoxes>
  struct Boxes {
    int y[kBoxes], z[kBoxes], batch[kBoxes];

    TEA_DEVICE explicit Boxes(const Box& own) {
#pragma unroll
      for (int i = 0; i < kBoxes; ++i) {
        y[i] = __shfl_sync(0xffffffff, own.y, i), z[i] = __shfl_sync(0xffffffff, own.z, i);
        batch[i] = __shfl_sync(0xffffffff, own.batch, i);
      }
    }
  };
  TEA_DEVICE void wait_until_empty(int slab, const Fill& fill) const {
    wait(s.empty[fill.buffer][slab], fill.parity ^ 1);
  }
  template <int kBoxes>
  TEA_DEVICE void load_slab(int slab, bool is_v, const Fill& fill,
                            const Boxes<kBoxes>& boxes) const {
    const bool exists = slab < slabs(is_v);
    Barrier& full = s.full[fill.buffer][slab];
    uint8_t* const to = s.kv[fill.buffer][slab];
    const TensorMap& map = is_v ? p.v : p.k;
    wait_until_empty(slab, fill);
    if (!elect_one()) return;
    arrive_and_expect_tx(full, exists ? kSlabBytes : 0);
    if (!exists) return;
#pragma unroll
    for (int i = 0; i < kBoxes; ++i)
      tma_load<5>(to + i * (kSlabBytes / kBoxes), map, full,
                  {slab * kSlabColumns, boxes.y[i], head, boxes.z[i], boxes.batch[i]},
                  CachePolicy::kEvictFirst);
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
      wait_until_empty(slab, fill);
      const bool valid = column < (is_v ? p.args.dim_v : p.args.dim_qk);
      // ptxas 13.0 adds a uniform register to the address where it finds one, in an instruction
      // that GPUs refuse as illegal; it finds none behind a shuffle.
      const uint32_t to = __shfl_sync(0xffffffff, shared_address(s.kv[fill.buffer][slab]) + offset,
                                      static_cast<int>(lane()));
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i)
        cp_async_16(to + i * kRowStep * width(kSwizzle), rows[i] + (valid ? column : 0), valid,
                    CachePolicy::kEvictFirst);
      cp_async_arrive(s.full[fill.buffer][slab]);
    }
  }
  // Page table entries into L1.
  TEA_DEVICE void prefetch_pages(bool is_v, int block) const {
    if (p.args.keys.form != TEA_PAGED) return;
    const SequenceBounds& b = s.load_work.item.bounds;
    const int key = block * kBlockN + thread();
    if (thread() < kBlockN && key < b.seqlen_kv) prefetch_l1(page_entry(is_v, key + b.start_kv));
  }

  // ------------------------------------------------------------------------------------- items

  // Calls load_part(part, fill) for the parts of K or V of a block, in the order in which they are
  // released. Not every warp has a slab of kRest.
  template <class LoadPart>
  TEA_DEVICE void each_part(bool is_v, int n, bool has_rest, LoadPart&& load_part) const {
    const auto load = [&](int part) {
      load_part(part, Fill(shares_kv<kSharedKvBoxes>(p), n, part, is_v));
    };
    if (!is_v && has_rest) load(kRest);
    load(n % 2);
    load(1 - n % 2);
  }
  template <int kBoxes>
  TEA_DEVICE void load_boxes(bool is_v, int n, const Boxes<kBoxes>& boxes) const {
    each_part(is_v, n, kRest * kPartSlabs + warp < kSlabs, [&](int part, const Fill& fill) {
      load_slab(part * kPartSlabs + warp, is_v, fill, boxes);
      __syncwarp();
    });
  }
  TEA_DEVICE void load_rows(bool is_v, int n, int block) const {
    const uint16_t* rows[kThreadRows];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) rows[i] = row_address(is_v, block, i);
    each_part(is_v, n, true, [&](int part, const Fill& fill) { gather(part, is_v, fill, rows); });
  }
  // V of the block before follows K of a block, if it is loaded on its own.
  template <int kBoxes>
  TEA_DEVICE void load_item_in_boxes(int first, int count) {
    head = __shfl_sync(0xffffffff, p.head_kv(s.load_work.item), 0);
    const int end = first + count;
    Boxes<kBoxes> now(box_of(false, first));
    Box next = box_of(false, min(first + 1, end - 1));
#pragma unroll 1
    for (int i = 0; i <= count; ++i) {
      if (i < count) {
        load_boxes(false, number + i, now);
        now = Boxes<kBoxes>(next);
        const int later = first + i + kFindDistance;
        prefetch_pages(false, later + 1);
        next = box_of(false, min(later, end - 1));
      }
      if (i > 0 && !shares_kv<kSharedKvBoxes>(p))
        load_boxes(true, number + i - 1, Boxes<kBoxes>(box_of(true, first + i - 1)));
    }
  }
  TEA_DEVICE void load_item_in_rows(int first, int count) {
#pragma unroll 1
    for (int i = 0; i <= count; ++i) {
      if (i < count) {
        load_rows(false, number + i, first + i);
        prefetch_pages(false, first + i + kFindDistance);
        if (!shares_kv<kSharedKvBoxes>(p)) prefetch_pages(true, first + i + kFindDistance);
      }
      if (i > 0 && !shares_kv<kSharedKvBoxes>(p)) load_rows(true, number + i - 1, first + i - 1);
    }
  }
  TEA_DEVICE void load_item() {
    const int first = s.load_work.item.first, count = s.load_work.item.end_of_keys() - first;
    if (count > 0 && gathers<kSharedKvBoxes>(p))
      load_item_in_rows(first, count);
    else if (count > 0 && boxes() == 1)
      load_item_in_boxes<1>(first, count);
    else if (count > 0)
      load_item_in_boxes<kMaxBoxes>(first, count);
    number += count;
  }
  TEA_DEVICE void sync() const { named_barrier_sync(kProducerBarrier, kProducerThreads); }
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
