// The producer warp of the MLA kernel: loads blocks of K, and of V unless it is a part of K, by
// TMA, a box of rows for each slab. Also the load of Q by the consumers.
#pragma once
#include "hopper/decode/mla/shared_memory.cuh"
#include "hopper/row_box.cuh"

namespace tea::hopper::decode::mla {

struct Loader {
  const LaunchParams& p;
  SharedStorage& s;
  int number = 0;  // of the next block of the item; see Fill

  // Loads the box of a slab that begins with a key, or the last box of the sequence instead of one
  // behind its end. Such keys are masked, and their values are finite if those of the sequence are.
  TEA_DEVICE void load_box(uint8_t* to, Barrier& full, bool is_v, int slab, int key) const {
    const AttentionArguments& a = p.args;
    const WorkItem& item = s.load_work.item;
    const int keys = item.bounds.seqlen_kv;
    key = min(key, (keys - 1) >> p.box_rows_log2 << p.box_rows_log2);
    int row = key + item.bounds.start_kv, batch = a.keys.form == TEA_RAGGED ? 0 : item.batch;
    if (a.keys.form == TEA_PAGED) {
      const PageTable& table = is_v ? a.page_table_v : a.page_table_k;
      bool valid = true;
      const int32_t page = table.entries[item.batch * table.stride + row / p.page_size];
      batch = static_cast<int>(clamp_page(page, table.pages, &valid));
      if (!valid) report_status(a, TEA_STATUS_BAD_PAGE);
      row = row % p.page_size;
    }
    const RowBox box(1 << p.box_rows_log2, row, keys - key, p.head_kv(item), batch);
    tma_load<5>(to, is_v ? p.v : p.k, full,
                {slab * kSlabColumns, box.y, box.head, box.z, box.batch});
  }
  // Loads a part of a block of K or V. The whole warp calls.
  TEA_DEVICE void load_part(int part, bool is_v, int n, int block) const {
    const Fill fill(p, n, part, is_v);
    wait(s.empty[fill.buffer][part], fill.parity ^ 1);
    Barrier& full = s.full[fill.buffer][part];
    const int slabs = ((is_v ? p.args.dim_v : p.args.dim_qk) + kSlabColumns - 1) / kSlabColumns;
    const int first = part * kPartSlabs, count = max(0, min(slabs - first, kPartSlabs));
    if (lane() == 0) arrive_and_expect_tx(full, static_cast<uint32_t>(count * kSlabBytes));
    __syncwarp();
    const int boxes_log2 = 6 - p.box_rows_log2;  // of a slab
#pragma unroll 1
    for (int i = lane(); i < count << boxes_log2; i += 32) {
      const int slab = first + (i >> boxes_log2);
      const int row = (i & ((1 << boxes_log2) - 1)) << p.box_rows_log2;
      load_box(s.kv[fill.buffer][slab] + row * width(kSwizzle), full, is_v, slab,
               block * kBlockN + row);
    }
    __syncwarp();
  }
  // Parts in the order in which they are released.
  TEA_DEVICE void load_k(int n, int block) const {
    load_part(kRest, false, n, block);
    load_part(n % 2, false, n, block);
    load_part(1 - n % 2, false, n, block);
  }
  TEA_DEVICE void load_v(int n, int block) const {
    load_part(n % 2, true, n, block);
    load_part(1 - n % 2, true, n, block);
  }
  TEA_DEVICE void load_item() {
    const int first = s.load_work.item.first, count = s.load_work.item.end_of_keys() - first;
#pragma unroll 1
    for (int i = 0; i <= count; ++i) {
      if (i < count) load_k(number + i, first + i);
      if (i > 0 && !p.shares_kv) load_v(number + i - 1, first + i - 1);
    }
    number += count;
  }
  TEA_DEVICE void run(const WorkCursor<kBlockShape>& first) {
    if (lane() == 0) s.load_work = first;
    for (bool has_work = true; has_work;) {
      __syncwarp();
      load_item();
      __syncwarp();  // all lanes have read the item
      if (lane() == 0) has_work = s.load_work.next(p);
      has_work = __shfl_sync(0xffffffff, has_work, 0);
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
#pragma unroll 6
  for (int i = static_cast<int>(threadIdx.x); i < kBlockM * kChunks; i += kConsumerThreads) {
    const int row = i / kChunks, chunk = i % kChunks, packed = first_row + row;
    uint4 x = {};
    if (packed < rows && chunk * 8 < a.dim_qk) {
      const int query = packed / p.group, head = first_head + packed % p.group;
      const int64_t at = first + query * a.q.seq + head * a.q.head + chunk * 8;
      x = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a.q.data) + at);
    }
    *reinterpret_cast<uint4*>(s.q[chunk / 8] + swizzled(kSwizzle, row, chunk % 8 * 16)) = x;
  }
  fence_proxy_async();  // wgmma reads it
}

}  // namespace tea::hopper::decode::mla
