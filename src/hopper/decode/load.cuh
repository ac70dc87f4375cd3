// Loads of K and V. Each team fills a ring of stages in shared memory, a block of keys at a time.
// The address of every row is computed by a lane, so that one path serves all strides, ragged
// buffers and pages of any size.
#pragma once
#include "hopper/decode/shared_memory.cuh"

namespace tea::hopper::decode {

// A warp of a team. Lane i < 16 finds row i of the block in K, lane 16 + i in V; the warps of the
// team share the copies.
template <KernelConfig C>
struct Loader {
  using T = Traits<C>;
  using Stage = typename T::Stage;
  static constexpr CachePolicy kCache = CachePolicy::kEvictFirst;  // no key is read twice

  const KernelParams& p;
  WorkCursor cursor;
  const int team;
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
  // The address of the lane's row.
  TEA_DEVICE int64_t row_address() const {
    const AttentionArguments& a = p.args;
    const WorkItem& item = cursor.item;
    const StridedTensor& x = is_v ? a.v : a.k;
    int64_t at = item.head_kv * x.head;
    if (a.keys.form == TEA_PAGED) {
      bool valid = true;
      const int64_t pages = is_v ? a.page_table_v.pages : a.page_table_k.pages;
      at += clamp_page(page, pages, &valid) * x.batch + key() % p.page_size * x.seq;
      if (!valid) report_status(a, TEA_STATUS_BAD_PAGE);
    } else {
      at += (a.keys.form == TEA_RAGGED ? 0 : item.batch * x.batch) + key() * x.seq;
    }
    return reinterpret_cast<int64_t>(x.data) + 2 * at;
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
  }

  // Starts the copies of one matrix. from: the address of the lane's row; first_lane: the lane that
  // has row 0; rows: those that are valid.
  template <int kColumns>
  TEA_DEVICE void copy_rows(uint8_t* to, int pitch, int64_t from, int first_lane, int rows,
                            int dim) const {
    constexpr int kChunks = kColumns / 8, kCopies = kBlockN * kChunks / 32;
    const int warp_in_team = T::kTeamWarps == 1 ? 0 : warp() % T::kTeamWarps;
    const uint32_t base = shared_address(to);
#pragma unroll(kCopies > 8 ? 4 : 8)  // more would spill registers
    for (int i = 0; i < kCopies; i += T::kTeamWarps) {
      const int at = (i + warp_in_team) * 32 + lane();
      const int row = at / kChunks, chunk = at % kChunks;
      const int64_t start = __shfl_sync(0xffffffff, from, first_lane + row);
      const bool valid = row < rows && chunk * 8 < dim;
      const char* const source = reinterpret_cast<const char*>(start) + (valid ? chunk * 16 : 0);
      cp_async_16(base + row * pitch + chunk * 16, source, valid, kCache);
    }
  }
  // Starts the copy of the next block, if there is one, and completes a group of copies.
  TEA_DEVICE void load(Stage& to) {
    if (has_block) {
      const int rows = min(cursor.item.bounds.seqlen_kv - block * kBlockN, kBlockN);
      const int64_t from = row_address();
      copy_rows<T::kDim>(to.k, T::kPitchK, from, 0, rows, p.args.dim_qk);
      copy_rows<T::kDimV>(to.v, T::kPitchV, from, 16, rows, p.args.dim_v);
      block += T::kTeams;
      settle();
    }
    cp_async_commit();
  }
};

// Loads the packed rows of Q. Called by all threads of the CTA.
template <KernelConfig C>
TEA_DEVICE void load_q(const KernelParams& p, typename Traits<C>::SharedStorage& s,
                       const WorkItem& item) {
  using T = Traits<C>;
  constexpr int kChunks = T::kDim / 8;
  const AttentionArguments& a = p.args;
  const int rows = item.bounds.seqlen_q * p.group;
  const int64_t first =
      a.queries.form == TEA_RAGGED ? item.bounds.start_q * a.q.seq : item.batch * a.q.batch;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < T::kBlockM * kChunks; i += T::kThreads) {
    const int row = i / kChunks, chunk = i % kChunks;
    uint4 x = {};
    if (row < rows && chunk * 8 < a.dim_qk) {
      const int query = row / p.group, head = item.head_kv * p.group + row % p.group;
      const int64_t at = first + query * a.q.seq + head * a.q.head + chunk * 8;
      x = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(a.q.data) + at);
    }
    *reinterpret_cast<uint4*>(s.q + row * T::kPitchK + chunk * 16) = x;
  }
}

}  // namespace tea::hopper::decode
