// Loads of K and V. Each team fills a ring of stages in shared memory, a block of keys at a time:
// by TMA, a box for each slab, or by cp.async where the rows of a block are in several pages. The
// address of every row is then computed by a lane. Both arrive at the same barrier.
#pragma once
#include "hopper/decode/shared_memory.cuh"
#include "hopper/device/pipeline.cuh"
#include "hopper/row_box.cuh"

namespace tea::hopper::decode {

struct LaunchParams : KernelParams {
  bool uses_tma;
  bool has_boxes;  // every block is a box of the tensor maps
  TensorMap k, v;  // if uses_tma; of a page if paged
};

// A warp of a team. Lane i < 16 finds row i of the block in K, lane 16 + i in V; the warps of the
// team share the copies.
template <KernelConfig C>
struct Loader {
  using T = Traits<C>;
  using Stage = typename T::Stage;
  static constexpr uint32_t kArrivals = 32 * T::kTeamWarps;        // at the barrier of a stage
  static constexpr CachePolicy kCache = CachePolicy::kEvictFirst;  // no key is read twice

  const LaunchParams& p;
  typename T::Cursor cursor;
  const int team;
  const int warp_in_team = T::kTeamWarps == 1 ? 0 : warp() % T::kTeamWarps;
  const bool is_v = lane() >= 16;
  int block = 0;
  bool has_block = false;
  int32_t page = 0;  // the table's entry for the lane's row

  // The lane's key of the block, and of the last block the last key instead of those past the end.
  TEA_DEVICE int key() const {
    return min(block * kBlockN + lane() % 16, cursor.item.bounds.seqlen_kv - 1) +
           cursor.item.bounds.start_kv;
  }
  // The page table is read when the block before is loaded, so that no load waits for it.
  TEA_DEVICE void read_page() {
    const AttentionArguments& a = p.args;
    if (a.keys.form != TEA_PAGED || !has_block) return;
    const PageTable& table = is_v ? a.page_table_v : a.page_table_k;
    page = table.entries[cursor.item.batch * table.stride + key() / p.page_size];
  }
  // Page table entries of the first blocks. Copies that start one after the other would each wait
  // for their own, so all are read into L1 at once.
  TEA_DEVICE void prefetch_pages() const {
    const AttentionArguments& a = p.args;
    if (a.keys.form != TEA_PAGED || !has_block) return;
    const PageTable& table = is_v ? a.page_table_v : a.page_table_k;
    const SequenceBounds& b = cursor.item.bounds;
#pragma unroll
    for (int i = 1; i < T::kStages; ++i) {
      const int row = min((block + i * T::kTeams) * kBlockN + lane() % 16, b.seqlen_kv - 1);
      prefetch_l1(table.entries + cursor.item.batch * table.stride +
                  (row + b.start_kv) / p.page_size);
    }
  }
  // The address of the lane's row.
  TEA_DEVICE int64_t row_address() const {
    const AttentionArguments& a = p.args;
    const WorkItem& item = cursor.item;
    const StridedTensor& x = is_v ? a.v : a.k;
    int64_t at = item.head_kv() * x.head;
    if (a.keys.form == TEA_PAGED) {
      bool valid = true;
      const int64_t pages = is_v ? a.page_table_v.pages : a.page_table_k.pages;
      at += clamp_page(page, pages, &valid) * x.batch + key() % p.page_size * x.seq;
      if (!valid) report_status(a, TEA_STATUS_BAD_PAGE);
    } else {
      at += (a.keys.form == TEA_RAGGED ? 0 : item.batch * x.batch) + key() * x.seq;
    }
    return reinterpret_cast<int64_t>(x.data) + T::kKvBytes * at;
  }

  // Moves to the team's first block from `block` on.
  TEA_DEVICE void settle() {
    while (has_block && block >= cursor.item.end_of_keys()) {
      has_block = cursor.next(p);
      block = cursor.item.first + team;
    }
    read_page();
  }
  TEA_DEVICE void start() {
    has_block = true;
    block = cursor.item.first + team;
    settle();
    prefetch_pages();
  }

  // The rows of the block that are keys.
  TEA_DEVICE int rows() const {
    return min(cursor.item.bounds.seqlen_kv - block * kBlockN, kBlockN);
  }
  TEA_DEVICE bool fits_box() const {
    if (!p.uses_tma || p.args.keys.form != TEA_PAGED) return p.uses_tma;
    const int first = block * kBlockN + cursor.item.bounds.start_kv;
    return first % p.page_size + rows() <= p.page_size;
  }
  // Called by one warp of the team: lane 0 starts the copies of K, lane 16 those of V. Slabs behind
  // the head dimension stay as they are: see clear_slabs().
  TEA_DEVICE void load_boxes(Stage& to, Barrier& full) const {
    if (lane() % 16 != 0) return;
    const AttentionArguments& a = p.args;
    const bool paged = a.keys.form == TEA_PAGED;
    int batch = a.keys.form == TEA_RAGGED ? 0 : cursor.item.batch;
    int row = block * kBlockN + cursor.item.bounds.start_kv;
    if (paged) {
      bool valid = true;
      const int64_t pages = is_v ? a.page_table_v.pages : a.page_table_k.pages;
      batch = static_cast<int>(clamp_page(page, pages, &valid));
      if (!valid) report_status(a, TEA_STATUS_BAD_PAGE);
      row = row % p.page_size;
      fence_proxy_async();  // cp.async may have written the stage
    }
    const RowBox box(kBlockN, row, rows(), cursor.item.head_kv(), batch);
    const int slabs = T::num_slabs(is_v ? a.dim_v : a.dim_qk);
    expect_tx(full, static_cast<uint32_t>(slabs * T::kSlabBytes));
    arrive(full, kArrivals / 2);
    const TensorMap& map = is_v ? p.v : p.k;
    uint8_t* const base = is_v ? to.v : to.k;
#pragma unroll 1
    for (int i = 0; i < slabs; ++i)
      tma_load<5>(base + i * T::kSlabBytes, map, full,
                  {i * T::kSlabColumns, box.y, box.head, box.z, box.batch}, kCache);
  }

  // Starts the copies of one matrix. from: the address of the lane's row; first_lane: the lane that
  // has row 0; rows: those that are valid.
  template <int kColumns>
  TEA_DEVICE void copy_rows(uint8_t* to, int64_t from, int first_lane, int rows, int dim) const {
    constexpr int kChunks = kColumns * T::kKvBytes / 16, kCopies = kBlockN * kChunks / 32;
    constexpr int kOfSlab = width(T::kSwizzle) / 16;
    const uint32_t base = shared_address(to);
#pragma unroll(4)  // more would spill registers
    for (int i = 0; i < kCopies; i += T::kTeamWarps) {
      const int at = (i + warp_in_team) * 32 + lane();
      const int row = at / kChunks, chunk = at % kChunks;
      const int64_t start = __shfl_sync(0xffffffff, from, first_lane + row);
      const bool valid = row < rows && chunk * 16 < dim * T::kKvBytes;
      const char* const source = reinterpret_cast<const char*>(start) + (valid ? chunk * 16 : 0);
      const uint32_t offset =
          chunk / kOfSlab * T::kSlabBytes + swizzled(T::kSwizzle, row, chunk % kOfSlab * 16);
      cp_async_16(base + offset, source, valid, kCache);
    }
  }
  // Starts the copy of the next block, if there is one. Called by all warps of the team.
  TEA_DEVICE void load(Stage& to, Barrier& full) {
    if (!has_block) return;
    if (fits_box()) {
      if (warp_in_team == 0) load_boxes(to, full);
      __syncwarp();
    } else {
      const int64_t from = row_address();
      copy_rows<T::kDim>(to.k, from, 0, rows(), p.args.dim_qk);
      copy_rows<T::kDimV>(to.v, from, 16, rows(), p.args.dim_v);
      cp_async_arrive(full);
    }
    block += T::kTeams;
    settle();
  }
};

// Zeroes the slabs of K behind the head dimension, which no box fills. Called by all threads before
// the first load.
template <KernelConfig C>
TEA_DEVICE void clear_slabs(const KernelParams& p, typename Traits<C>::SharedStorage& s) {
  using T = Traits<C>;
  const int first = T::num_slabs(p.args.dim_qk) * T::kSlabBytes;
  if (first >= static_cast<int>(sizeof(T::Stage::k))) return;
#pragma unroll 1
  for (int i = 0; i < T::kTeams * T::kStages; ++i)
#pragma unroll 1
    for (int at = first + static_cast<int>(threadIdx.x) * 16;
         at < static_cast<int>(sizeof(T::Stage::k)); at += T::kAllThreads * 16)
      *reinterpret_cast<uint4*>(s.stages[i / T::kStages][i % T::kStages].k + at) = uint4{};
}

}  // namespace tea::hopper::decode
