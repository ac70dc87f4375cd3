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
    const int slabs = ((is_v ? a.dim_v : a.dim_qk) + T::kSlabColumns - 1) / T::kSlabColumns;
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

// A producer warp of a team where every block is a box. A box is computed before the wait for its
// stage, and the first one before that for the predecessor: a warp that is alone on its scheduler
// needs several clocks for an instruction.
template <KernelConfig C>
struct BoxLoader {
  using T = Traits<C>;
  static constexpr int kSlabsK = T::kDim / T::kSlabColumns, kSlabsV = T::kDimV / T::kSlabColumns;

  const LaunchParams& p;
  typename T::SharedStorage& s;
  typename T::Cursor cursor;
  const int team;
  int block = 0;
  // The pages of the team's blocks: lane i has those of the i-th one from `pages_from` on.
  int pages_k = 0, pages_v = 0, pages_from = -1;

  struct Box {
    int y, z, head, batch_k, batch_v;
  };

  // Moves from `block` to the next one that has keys. False: the share has no more.
  TEA_DEVICE bool settle() {
    while (block >= cursor.item.end_of_keys()) {
      if (!cursor.next(p)) return false;
      block = cursor.item.first + team;
      pages_from = -1;
    }
    return true;
  }
  TEA_DEVICE int entry_of(const PageTable& table, int key) const {
    bool valid = true;
    const int64_t at = cursor.item.batch * table.stride + key / p.page_size;
    const auto page = static_cast<int>(clamp_page(table.entries[at], table.pages, &valid));
    if (!valid) report_status(p.args, TEA_STATUS_BAD_PAGE);
    return page;
  }
  TEA_DEVICE void read_pages() {
    const int own = block + static_cast<int>(lane()) * T::kTeams;
    pages_from = block;
    if (own >= cursor.item.end_of_keys()) return;
    const int key = own * kBlockN + cursor.item.bounds.start_kv;
    pages_k = entry_of(p.args.page_table_k, key), pages_v = entry_of(p.args.page_table_v, key);
  }
  TEA_DEVICE Box box() {
    const SequenceBounds& b = cursor.item.bounds;
    int row = block * kBlockN + b.start_kv;
    const int batch = has_ragged_keys<T::kIsPlain>(p) ? 0 : cursor.item.batch;
    Box x = {0, 0, cursor.item.head_kv(), batch, batch};
    if (is_paged<T::kIsPlain>(p)) {
      if (pages_from < 0 || block >= pages_from + 32 * T::kTeams) read_pages();
      const int from = (block - pages_from) / T::kTeams;
      x.batch_k = __shfl_sync(0xffffffff, pages_k, from);
      x.batch_v = __shfl_sync(0xffffffff, pages_v, from);
      row = row % p.page_size;
    }
    const RowBox rows(kBlockN, row, b.seqlen_kv - block * kBlockN, 0, 0);
    x.y = rows.y, x.z = rows.z;
    return x;
  }
  TEA_DEVICE void load(int stage, const Box& x) const {
    Barrier& full = s.full[team][stage];
    auto& to = s.stages[team][stage];
    const int slabs_k = (p.args.dim_qk + T::kSlabColumns - 1) / T::kSlabColumns;
    const int slabs_v = (p.args.dim_v + T::kSlabColumns - 1) / T::kSlabColumns;
    expect_tx(full, static_cast<uint32_t>((slabs_k + slabs_v) * T::kSlabBytes));
#pragma unroll
    for (int i = 0; i < kSlabsK; ++i)
      if (i < slabs_k)
        tma_load<5>(to.k + i * T::kSlabBytes, p.k, full,
                    {i * T::kSlabColumns, x.y, x.head, x.z, x.batch_k}, Loader<C>::kCache);
#pragma unroll
    for (int i = 0; i < kSlabsV; ++i)
      if (i < slabs_v)
        tma_load<5>(to.v + i * T::kSlabBytes, p.v, full,
                    {i * T::kSlabColumns, x.y, x.head, x.z, x.batch_v}, Loader<C>::kCache);
    arrive(full, Loader<C>::kArrivals);
  }
  TEA_DEVICE void run() {
    block = cursor.item.first + team;
    if (is_paged<T::kIsPlain>(p)) wait_on_dependent_grids();
    bool has_block = settle();
    Box x = {};
    if (has_block) x = box();
    wait_on_dependent_grids();
    PipelineState<T::kStages> state;
#pragma unroll 1
    while (has_block) {
      wait(s.empty[team][state.stage], state.parity ^ 1);
      if (elect_one()) load(state.stage, x);
      __syncwarp();
      state.advance();
      block += T::kTeams;
      has_block = settle();
      if (has_block) x = box();
    }
  }
};

// Zeroes the slabs of K behind the head dimension, which no box fills. Called by all threads before
// the first load.
template <KernelConfig C>
TEA_DEVICE void clear_slabs(const KernelParams& p, typename Traits<C>::SharedStorage& s) {
  using T = Traits<C>;
  const int first = (p.args.dim_qk + T::kSlabColumns - 1) / T::kSlabColumns * T::kSlabBytes;
  if (first >= static_cast<int>(sizeof(T::Stage::k))) return;
#pragma unroll 1
  for (int i = 0; i < T::kTeams * T::kStages; ++i)
#pragma unroll 1
    for (int at = first + static_cast<int>(threadIdx.x) * 16;
         at < static_cast<int>(sizeof(T::Stage::k)); at += T::kAllThreads * 16)
      *reinterpret_cast<uint4*>(s.stages[i / T::kStages][i % T::kStages].k + at) = uint4{};
}

// Stores eight elements of a row of Q. With K in FP8, a thread has four adjacent columns of K where
// two fragments of 16 bits have two each: the columns of each 16 are in that order.
template <KernelConfig C>
TEA_DEVICE void store_q(uint8_t* row, int chunk, const uint4& x) {
  if constexpr (C.has_fp8_kv) {
    uint8_t* const to = row + chunk / 2 * 32 + chunk % 2 * 8;
    *reinterpret_cast<uint2*>(to) = {x.x, x.z};
    *reinterpret_cast<uint2*>(to + 16) = {x.y, x.w};
  } else {
    *reinterpret_cast<uint4*>(row + chunk * 16) = x;
  }
}

// The load of the packed rows of Q, by all threads that compute. Addresses are computed first: for
// the first item before the wait for the predecessor.
template <KernelConfig C>
struct QLoader {
  using T = Traits<C>;
  static constexpr int kChunks = T::kDim / 8, kCount = T::kBlockM * kChunks;
  static constexpr int kOfThread = (kCount + T::kThreads - 1) / T::kThreads;
  static constexpr int kAtOnce = kOfThread < 4 ? kOfThread : 4;

  const uint16_t* from[kOfThread];  // null: zeros

  static TEA_DEVICE int number(int k) { return k * T::kThreads + static_cast<int>(threadIdx.x); }
  TEA_DEVICE void locate(const KernelParams& p, const WorkItem& item) {
    const AttentionArguments& a = p.args;
    const int rows = item.bounds.seqlen_q * p.group, first_head = item.head_kv() * p.group;
    const int64_t first =
        has_ragged_queries<T::kIsPlain>(p) ? item.bounds.start_q * a.q.seq : item.batch * a.q.batch;
#pragma unroll
    for (int k = 0; k < kOfThread; ++k) {
      const int row = number(k) / kChunks, column = number(k) % kChunks * 8;
      const int query = row / p.group, head = first_head + row % p.group;
      const int64_t at = first + query * a.q.seq + head * a.q.head + column;
      const bool valid = row < rows && column < a.dim_qk;
      from[k] = valid ? static_cast<const uint16_t*>(a.q.data) + at : nullptr;
      // So that the compiler does not move this behind the wait.
      asm volatile("" : "+l"(from[k]));
    }
  }
  TEA_DEVICE void load(typename T::SharedStorage& s) const {
#pragma unroll
    for (int first = 0; first < kOfThread; first += kAtOnce) {
      uint4 x[kAtOnce] = {};
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (first + k < kOfThread && from[first + k])
          x[k] = *reinterpret_cast<const uint4*>(from[first + k]);
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int i = number(first + k);
        if (i < kCount) store_q<C>(s.q + i / kChunks * T::kPitchQ, i % kChunks, x[k]);
      }
    }
  }
};

}  // namespace tea::hopper::decode
