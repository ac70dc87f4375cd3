// The load warps where keys and values are in pages: one loads K, another one Q and V. A block is
// loaded in boxes of rows, each of which is within one page.
#pragma once
#include "hopper/forward/load.cuh"
#include "hopper/forward/page_box.cuh"
#include "hopper/pages.cuh"

namespace tea::hopper {

// Run by a warp. Each lane finds a box of a block. All pass theirs to the lane that issues the
// loads, because TMA takes its operands from uniform registers, which lanes would fill one after
// the other.
template <KernelConfig C, bool kIsV>
struct PagedLoadWarp {
  using T = Traits<C>;
  static constexpr int kBlockN = T::kBlockN, kSlabBytes = T::kSlabBytes;
  static constexpr int kBoxesAtOnce = 8;
  // With three consumers the warp that also loads Q has too few registers for more than one box.
  static constexpr bool kHasRegisters = !kIsV || T::kConsumers == 2;
  static_assert(kBlockN / kPageMultiple <= 32);

  const KernelParams& p;
  typename T::SharedStorage& s;
  PipelineState<T::kKvStages> state{};
  PipelineState<2> work_state{};

  // The box of a lane, with its page in the pool.
  struct Box {
    int page, y, z;
  };

  TEA_DEVICE int rows_of_box() const { return 1 << p.box_rows_log2; }
  TEA_DEVICE int boxes() const { return kBlockN >> p.box_rows_log2; }
  TEA_DEVICE auto& pipeline() const { return kIsV ? s.pipeline_v : s.pipeline_k; }
  TEA_DEVICE Barrier& full() const { return pipeline().full[state.stage]; }
  TEA_DEVICE uint8_t* stage() const { return kIsV ? s.v[state.stage] : s.k[state.stage]; }
  TEA_DEVICE void acquire() {
    pipeline().producer_acquire(state);
    const int slabs = T::num_slabs(kIsV ? p.args.dim_v : p.args.dim_qk);
    if (elect_one()) pipeline().producer_expect_tx(state, slabs * kBlockN * kSlabBytes);
  }
  // Loads kCount boxes from box `first` of the block on. No condition stands between the loads, so
  // that they share uniform registers.
  template <int kCount>
  TEA_DEVICE void load_boxes(const TensorMap& map, int head, const Box (&box)[kCount], int first) {
    if (elect_one()) {
      const int box_bytes = kSlabBytes << p.box_rows_log2;
      uint8_t* to = stage() + first * box_bytes;
#pragma unroll 1
      for (int column = 0; column < (kIsV ? p.args.dim_v : p.args.dim_qk);
           column += T::kSlabDim, to += kBlockN * kSlabBytes) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          tma_load(to + i * box_bytes, map, full(), {column, box[i].y, head, box[i].z, box[i].page},
                   CachePolicy::kEvictLast);
      }
    }
    __syncwarp();
  }
  // Loads a block of kCount boxes, or of groups of so many, that all have the same y and z. They
  // are passed on before the wait, because consumers wait for everything that happens after it.
  template <int kCount>
  TEA_DEVICE void load_equal_boxes(int head, const Box& own) {
    Box box[kCount];
    const auto pass_on = [&](int first) {
#pragma unroll
      for (int i = 0; i < kCount; ++i)
        box[i] = {__shfl_sync(0xffffffff, own.page, first + i), 0, box[0].z};
    };
    box[0].z = __shfl_sync(0xffffffff, own.z, 0);
    pass_on(0);
    acquire();
    load_boxes<kCount>(kIsV ? p.v : p.k, head, box, 0);
#pragma unroll 1
    for (int first = kCount; first < boxes(); first += kCount) {
      pass_on(first);
      load_boxes<kCount>(kIsV ? p.v : p.k, head, box, first);
    }
  }
  // Loads a block of any boxes. skips: the first one has keys that no row attends to.
  TEA_DEVICE void load_any_boxes(int head, const Box& own, bool skips) {
    acquire();
#pragma unroll 1
    for (int i = 0; i < boxes(); ++i) {
      const Box box[1] = {{__shfl_sync(0xffffffff, own.page, i), __shfl_sync(0xffffffff, own.y, i),
                           __shfl_sync(0xffffffff, own.z, i)}};
      const TensorMap& map = skips && i == 0 ? kIsV ? p.first_v : p.first_k : kIsV ? p.v : p.k;
      load_boxes<1>(map, head, box, i);
    }
  }
  TEA_DEVICE void load_block(const WorkTile& w, int block, const Box& own) {
    const bool skips = block == 0 && w.lo > 0;
    const bool is_full = (block + 1) * kBlockN <= w.seqlen_kv && !skips;
    const bool is_equal = is_full && rows_of_box() == p.page_size;
    const int head = w.head_kv;
    if (kHasRegisters && is_full && boxes() == 1)
      load_equal_boxes<1>(head, own);
    else if (kHasRegisters && is_equal && boxes() == 2)
      load_equal_boxes<2>(head, own);
    else if (kHasRegisters && is_equal && boxes() == 4)
      load_equal_boxes<4>(head, own);
    else if (kHasRegisters && is_equal && boxes() % kBoxesAtOnce == 0)
      load_equal_boxes<kBoxesAtOnce>(head, own);
    else
      load_any_boxes(head, own, skips);
    state.advance();
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
  // An entry of the page table is read a block ahead of its use.
  TEA_DEVICE void load_tile(const WorkTile& w) {
    if constexpr (kIsV) load_q(w);
    const Range b = w.blocks;
    if (b.begin == b.end) return;
    const PageTable& table = kIsV ? p.args.page_table_v : p.args.page_table_k;
    const int32_t* const entries = table.entries + w.batch * table.stride;
    const auto box_of = [&](int block) {
      return page_box<kBlockN>(w, p.page_size, p.box_rows_log2, block, static_cast<int>(lane()));
    };
    int entry = entries[box_of(b.end - 1).page];
#pragma unroll 1
    for (int block = b.end - 1; block >= b.begin; --block) {
      const PageBox found = box_of(block);
      const Box box = {page_of(p.args, entry, table.pages), found.y, found.z};
      if (block > b.begin) entry = entries[box_of(block - 1).page];
      load_block(w, block, box);
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
