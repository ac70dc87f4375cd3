// The load warps where keys and values are in pages: one loads K, another one Q and V. A block is
// loaded in boxes of rows, each of which is within one page.
#pragma once
#include "hopper/forward/load.cuh"
#include "hopper/forward/page_box.cuh"
#include "hopper/pages.cuh"

namespace tea::hopper {

// Run by a warp. Loops over the blocks that most tiles consist of have few instructions, because
// each one takes an issue slot from a consumer. One lane issues all loads: TMA takes its operands
// from uniform registers, which lanes would fill one after the other.
template <KernelConfig C, bool kIsV>
struct PagedLoadWarp {
  using T = Traits<C>;
  static constexpr int kBlockN = T::kBlockN, kSlabBytes = T::kSlabBytes;
  static constexpr int kMaxSlabs = (kIsV ? T::kDimV : T::kDim) / T::kSlabDim;
  // Boxes that are passed to the lane that loads at once. With three consumers the warp that also
  // loads Q has few registers.
  static constexpr int kBoxesAtOnce = kIsV && T::kConsumers == 3 ? 2 : 4;
  static_assert(kBlockN / kPageMultiple <= 32);

  const KernelParams& p;
  typename T::SharedStorage& s;
  PipelineState<T::kKvStages> state{};
  PipelineState<2> work_state{};

  TEA_DEVICE int rows_of_box() const { return 1 << p.box_rows_log2; }
  TEA_DEVICE int boxes() const { return kBlockN >> p.box_rows_log2; }
  TEA_DEVICE int slabs() const { return T::num_slabs(kIsV ? p.args.dim_v : p.args.dim_qk); }
  TEA_DEVICE const TensorMap& map() const { return kIsV ? p.v : p.k; }
  TEA_DEVICE const TensorMap& first_map() const { return kIsV ? p.first_v : p.first_k; }
  TEA_DEVICE const PageTable& table() const {
    return kIsV ? p.args.page_table_v : p.args.page_table_k;
  }
  TEA_DEVICE const int32_t* entries(const WorkTile& w) const {
    return table().entries + w.batch * table().stride;
  }
  TEA_DEVICE int page_of_entry(int32_t entry) const {
    if (static_cast<uint32_t>(entry) < static_cast<uint32_t>(kIsV ? p.pages_v : p.pages_k))
      return entry;
    return page_of(p.args, entry, table().pages);
  }
  TEA_DEVICE auto& pipeline() const { return kIsV ? s.pipeline_v : s.pipeline_k; }
  TEA_DEVICE Barrier& full() const { return pipeline().full[state.stage]; }
  TEA_DEVICE uint8_t* stage() const { return kIsV ? s.v[state.stage] : s.k[state.stage]; }
  TEA_DEVICE void acquire() {
    pipeline().producer_acquire(state);
    pipeline().producer_expect_tx(state, slabs() * kBlockN * kSlabBytes);
  }
  TEA_DEVICE void advance(int blocks) {
    const int stages = state.stage + blocks;
    state.stage = stages % T::kKvStages;
    state.parity ^= stages / T::kKvStages & 1;
  }

  // Blocks `begin` to `end` - 1, from the last to the first, of which any box may be a part of a
  // page, end with the sequence, or begin with keys that no row attends to. Each lane finds a box.
  // Here and below, an entry of the page table is read a block ahead of its use.
  TEA_DEVICE void load_any_blocks(const WorkTile& w, int begin, int end) {
    const auto box_of = [&](int block) {
      return page_box<kBlockN>(w, p.page_size, p.box_rows_log2, block, static_cast<int>(lane()));
    };
    int entry = entries(w)[box_of(end - 1).page];
#pragma unroll 1
    for (int block = end - 1; block >= begin; --block) {
      const PageBox own = box_of(block);
      const int own_page = page_of_entry(entry);
      if (block > begin) entry = entries(w)[box_of(block - 1).page];
      const bool skips = block == 0 && w.lo > 0;
#pragma unroll 1
      for (int i = 0; i < boxes(); ++i) {
        const int page = __shfl_sync(0xffffffff, own_page, i);
        const int y = __shfl_sync(0xffffffff, own.y, i), z = __shfl_sync(0xffffffff, own.z, i);
        if (elect_one()) {
          if (i == 0) acquire();
          uint8_t* to = stage() + i * (kSlabBytes << p.box_rows_log2);
#pragma unroll 1
          for (int slab = 0; slab < slabs(); ++slab, to += kBlockN * kSlabBytes)
            tma_load(to, skips && i == 0 ? first_map() : map(), full(),
                     {slab * T::kSlabDim, y, w.head_kv, z, page}, CachePolicy::kEvictLast);
        }
        __syncwarp();
      }
      state.advance();
    }
  }
  // The same for full blocks, each within a page, by one lane.
  TEA_DEVICE void load_within_pages(const WorkTile& w, int begin, int end) {
    if (elect_one()) {
      const int key = w.start_kv + (end - 1) * kBlockN, page_size = p.args.keys.page_size;
      const int number = key / p.page_size, head = w.head_kv;
      const int32_t* at = entries(w) + number;
      int row = key - number * page_size, entry = *at;
#pragma unroll 1
      for (int block = end - 1; block >= begin; --block) {
        const int page = page_of_entry(entry), z = row + kBlockN;
        row -= kBlockN;
        if (row < 0 && block > begin) row += page_size, entry = *--at;
        acquire();
#pragma unroll
        for (int slab = 0; slab < kMaxSlabs; ++slab)
          if (slab < slabs())
            tma_load(stage() + slab * kBlockN * kSlabBytes, map(), full(),
                     {slab * T::kSlabDim, 0, head, z, page}, CachePolicy::kEvictLast);
        state.advance();
      }
    } else {
      advance(end - begin);
    }
    __syncwarp();
  }
  // The same for full blocks of which each box is a page.
  template <int kAtOnce>
  TEA_DEVICE void load_whole_pages(const WorkTile& w, int begin, int end) {
    static_assert((kBlockN & (kBlockN - 1)) == 0, "boxes of a block come in groups of kAtOnce");
    const int last = w.start_kv + (end - 1) * kBlockN, head = w.head_kv;
    const int own = min(static_cast<int>(lane()), boxes() - 1);
    const int32_t* at = entries(w) + (last >> p.box_rows_log2) + own;
    int entry = *at;
#pragma unroll 1
    for (int block = end - 1; block >= begin; --block) {
      const int own_page = page_of_entry(entry);
      at -= boxes();
      if (block > begin) entry = *at;
#pragma unroll 1
      for (int first = 0; first < boxes(); first += kAtOnce) {
        int page[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) page[i] = __shfl_sync(0xffffffff, own_page, first + i);
        if (elect_one()) {
          if (first == 0) acquire();
          const int box_bytes = kSlabBytes << p.box_rows_log2;
          uint8_t* to = stage() + first * box_bytes;
#pragma unroll 1
          for (int slab = 0; slab < slabs(); ++slab, to += kBlockN * kSlabBytes) {
            // No condition stands between these loads, so that they share uniform registers.
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i)
              tma_load(to + i * box_bytes, map(), full(),
                       {slab * T::kSlabDim, 0, head, rows_of_box(), page[i]},
                       CachePolicy::kEvictLast);
          }
        }
        __syncwarp();
      }
      state.advance();
    }
  }
  // The state of Q's pipeline follows from the number of tiles, so that it takes no register.
  TEA_DEVICE void load_q(const WorkTile& w) {
    static_assert(T::kQStages <= 2);
    if (elect_one()) {
      LoadWarp<C> dense{p, s};
      if constexpr (T::kQStages == 2)
        dense.q_state = {work_state.stage, work_state.parity};
      else
        dense.q_state = {0, static_cast<uint32_t>(work_state.stage)};
      dense.load_q(w);
    }
    __syncwarp();
  }
  // First blocks that end with the sequence, then full ones, then one that begins with keys that no
  // row attends to.
  TEA_DEVICE void load_tile(const WorkTile& w) {
    if constexpr (kIsV) load_q(w);
    const bool is_simple = boxes() == 1 || rows_of_box() == p.page_size;
#pragma unroll 1
    for (int part = 0; part < 3; ++part) {
      const int full_end = is_simple ? min(w.blocks.end, w.seqlen_kv / kBlockN) : w.blocks.begin;
      const int full_begin = min(max(w.blocks.begin, w.lo > 0 ? 1 : 0), full_end);
      const int end = part == 0 ? w.blocks.end : part == 1 ? full_end : full_begin;
      const int begin = part == 0 ? full_end : part == 1 ? full_begin : w.blocks.begin;
      if (begin >= end) continue;
      if (part != 1)
        load_any_blocks(w, begin, end);
      else if (boxes() == 1)
        load_within_pages(w, begin, end);
      else if (kBoxesAtOnce == 2 || boxes() == 2)
        load_whole_pages<2>(w, begin, end);
      else
        load_whole_pages<kBoxesAtOnce>(w, begin, end);
    }
  }
  TEA_DEVICE void run() {
    for (;;) {
      const WorkTile& w = s.work.read(work_state);
      if (w.head < 0) return;
      load_tile(w);
      __syncwarp();  // one lane releases the descriptor, which all have read
      if (lane() == 0) s.work.pipeline.consumer_release(work_state);
      work_state.advance();
    }
  }
};

}  // namespace tea::hopper
