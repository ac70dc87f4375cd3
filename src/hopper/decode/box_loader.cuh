// The producer warps of a team where every block is a box of the tensor maps.
#pragma once
#include "hopper/decode/load.cuh"

namespace tea::hopper::decode {

// A producer warp of a team. The coordinates of a box are computed before the wait for its stage
// and, for the first one of dense K and V, before the wait for the predecessor: a warp that is
// alone on its scheduler needs several clocks for an instruction. One lane loads both K and V.
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
    const int slabs_k = T::num_slabs(p.args.dim_qk), slabs_v = T::num_slabs(p.args.dim_v);
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

}  // namespace tea::hopper::decode
