// What the roles of a forward kernel share, and those that fill and empty it: the producer copies
// Q, K and V, and a bias, block by block; the porter has O leave.
//
// A box of a tensor map must end where a sequence ends, wherever that is. So maps have one
// dimension more: y, as long as the box is high, and z with the same stride. A box of n rows from
// row r on begins at y = height - n, z = r + n, height rows before the tensor: what is beyond y
// reads as zeros. The memory before the tensor may not exist, and of a box without an element the
// copy engine touches where the map begins. So none is loaded: not of rows, and not of slabs beyond
// the head dimension, which are zeroed once where they meet in a product, and else meet nothing.
//
// Shared memory: q[q_stages][consumers], each 64 rows; k and v[kv_stages]; o[consumers] where there
// is room; the barriers. Tiles lie in slabs, one swizzle wide. O does not leave through Q's memory,
// which is free for the next tile as soon as the last scores are there.
#pragma once
#include "hopper/device/tma.cuh"
#include "hopper/forward_config.cuh"

namespace tea::hopper {

// The shapes of a kernel, and its shared memory.
template <Config C>
struct Shared {
  static constexpr int kDim = C.row.dim, kDimV = C.row.dim_v, kCols = C.row.cols;
  static constexpr int kConsumers = C.row.consumers, kRows = 64 * kConsumers;
  static constexpr int kThreads = 128 + 128 * kConsumers, kStages = C.row.kv_stages;
  static constexpr Swizzle kSwizzle = kDim % 64 == 0 ? Swizzle::k128 : Swizzle::k64;
  static constexpr int kSlab = width(kSwizzle), kSlabDim = kSlab / 2;
  static_assert(kDim % kSlabDim == 0 && kDimV % kSlabDim == 0 && kDimV <= kDim);

  struct Smem {
    alignas(1024) uint8_t q[C.row.q_stages][kConsumers][64 * kDim * 2];
    alignas(1024) uint8_t k[kStages][kCols * kDim * 2];
    alignas(1024) uint8_t v[kStages][kCols * kDimV * 2];
    alignas(1024) uint8_t bias[C.biased() ? kConsumers : 0][BiasTile::bytes(kCols)];
    alignas(1024) uint8_t o[C.row.staged ? kConsumers : 0][64 * kDimV * 2];
    Ring<C.row.q_stages> ring_q[kConsumers];
    Ring<kStages> ring_k, ring_v;
    Ring<1> ring_bias[C.biased() ? kConsumers : 0];
    Ring<1> ring_o[C.row.staged ? kConsumers : 0];
    Mail<Work> mail;
    Work draft;         // the planner's: the next message,
    Common window[32];  // and the sequences that it searches
    uint32_t spare;     // see follow()
  };
  static_assert(sizeof(Smem) <= 227 * 1024, "the shared-memory plan does not fit");

  // Where a box of `height` rows begins, of which `count` from row `row` on are there.
  struct Box {
    int y, z, head, batch;
    TEA_DEVICE Box(int height, int row, int count, int head_, int batch_)
        : head(head_), batch(batch_) {
      const int n = max(0, min(count, height));
      y = height - n;
      z = row + n;
    }
  };
  // The sequence's place in a side's maps.
  static TEA_DEVICE int batch_of(const Sequences& side, const Work& w) {
    return side.form == Form::kRagged ? 0 : w.sequence;
  }

  // What BiasTile::rows is in a tile: none where a box would not start at a multiple of 16 bytes,
  // which the copy engine answers with a fault.
  static TEA_DEVICE int bias_rows(const Parameters& p, const Work& w) {
    return w.skipped % 8 ? 0 : p.bias_rows;
  }

  // Slabs with something in them.
  static TEA_DEVICE int slabs_of(int dim) { return (dim + kSlabDim - 1) / kSlabDim; }
};

// One thread that loads what the consumers work on.
template <Config C>
struct Producer {
  using S = Shared<C>;
  using Smem = typename S::Smem;
  using Box = typename S::Box;
  static constexpr int kCols = S::kCols, kConsumers = S::kConsumers, kStages = S::kStages;
  static constexpr int kSlab = S::kSlab, kSlabDim = S::kSlabDim;

  const Parameters& p;
  Smem& s;
  const int slabs = S::slabs_of(p.f.dim), slabs_v = S::slabs_of(p.f.dim_v);
  Position<C.row.q_stages> at_q{};
  Position<kStages> at_k{}, at_v{};
  Position<2> at_mail{};
  Position<1> at_bias{};

  // A box in those slabs that reach into the head dimension, kSlabs at most. Nothing is left to be
  // found out when the stage becomes empty: consumers wait for what is late here.
  template <int kHeight, int kSlabs, int kDepth>
  TEA_DEVICE void load_slabs(uint8_t* to, const TensorMap& map, Ring<kDepth>& ring,
                             Position<kDepth> at, int slabs, const Box& b, Cache cache) {
    ring.wait_empty(at);
    ring.fill(at, slabs * kHeight * kSlab);
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
      if (slab < slabs)
        load(to + slab * kHeight * kSlab, map, ring.full[at.stage],
             {slab * kSlabDim, b.y, b.head, b.z, b.batch}, cache);
  }
  TEA_DEVICE void load_q(const Work& w) {
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) {
      const int row = w.first + 64 * c;
      if (row < w.rows) {
        load_slabs<64, S::kDim / kSlabDim>(
            s.q[at_q.stage][c], p.q, s.ring_q[c], at_q, slabs,
            {64, w.start + row, w.rows - row, w.head, S::batch_of(p.f.queries, w)},
            Cache::kEvictFirst);
      } else {
        s.ring_q[c].wait_empty(at_q);
        arrive(s.ring_q[c].full[at_q.stage]);
      }
    }
    at_q.advance();
  }
  // What the boxes of a tile's keys have in common.
  struct Keys {
    int start, count, head, batch;
    TEA_DEVICE Box block(int number) const {
      const int key = number * kCols;
      return {kCols, start + key, count - key, head, batch};
    }
  };
  TEA_DEVICE void load_k(const Keys& keys, int block) {
    load_slabs<kCols, S::kDim / kSlabDim>(s.k[at_k.stage], p.k, s.ring_k, at_k, slabs,
                                          keys.block(block), Cache::kEvictLast);
    at_k.advance();
  }
  TEA_DEVICE void load_v(const Keys& keys, int block) {
    load_slabs<kCols, S::kDimV / kSlabDim>(s.v[at_v.stage], p.v, s.ring_v, at_v, slabs_v,
                                           keys.block(block), Cache::kEvictLast);
    at_v.advance();
  }
  // The bias of each consumer's rows in a block. No box is without an element here either.
  TEA_DEVICE void load_bias(const Work& w, int block) {
    const int height = S::bias_rows(p, w);
    if (!height) return;
    const int key = block * kCols, keys = min(kCols, w.keys - key);
    const int slabs = (keys + BiasTile::kColumns - 1) / BiasTile::kColumns;
#pragma unroll
    for (int c = 0; c < kConsumers; ++c) {
      Ring<1>& ring = s.ring_bias[c];
      const int row = w.first + 64 * c;
      ring.wait_empty(at_bias);
      if (row >= w.rows) {
        arrive(ring.full[0]);
        continue;
      }
      ring.fill(at_bias, slabs * height * width(BiasTile::kSwizzle));
#pragma unroll 1
      for (int slab = 0; slab < slabs; ++slab)
        load(s.bias[c] + slab * BiasTile::kSlab, p.bias, ring.full[0],
             {w.skipped + key + slab * BiasTile::kColumns, height > 1 ? row : 0, w.bias_head,
              w.bias_sequence});
    }
    at_bias.advance();
  }
  TEA_DEVICE void load_tile(const Work& w) {
    const Blocks b = w.blocks;
    if (b.begin == b.end) return load_q(w);
    const Keys keys = {w.start_kv, w.keys, w.head_kv, S::batch_of(p.f.keys, w)};
    load_k(keys, b.end - 1);  // before Q, whose memory may be in use for longer
    load_q(w);
    if constexpr (C.biased()) load_bias(w, b.end - 1);
    for (int block = b.end - 1; block > b.begin; --block) {
      load_k(keys, block - 1);
      load_v(keys, block);
      if constexpr (C.biased()) load_bias(w, block - 1);
    }
    load_v(keys, b.begin);
  }
  TEA_DEVICE void run() {
    for (;;) {
      const Work& w = s.mail.read(at_mail);
      if (w.head < 0) return;
      load_tile(w);
      s.mail.ring.release(at_mail);
      at_mail.advance();
    }
  }
};

// One thread that has O leave shared memory, each consumer's rows when they are there.
template <Config C>
struct Porter {
  using S = Shared<C>;
  using Box = typename S::Box;
  static constexpr int kSlabs = S::kDimV / S::kSlabDim;

  const Parameters& p;
  typename S::Smem& s;
  Position<2> at_mail{};
  Position<1> at_o{};

  TEA_DEVICE void carry(const Box& b, int consumer) {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
      if (slab * S::kSlabDim < p.f.dim_v)
        store<5>(p.o, s.o[consumer] + slab * 64 * S::kSlab,
                 {slab * S::kSlabDim, b.y, b.head, b.z, b.batch});
    commit_stores();
    wait_stores_read<0>();
  }
  TEA_DEVICE void run() {
    for (;;) {
      const Work& w = s.mail.read(at_mail);
      if (w.head < 0) return;
      const int first = w.first, rows = w.rows, start = w.start, head = w.head;
      const int batch = S::batch_of(p.f.queries, w);
      s.mail.ring.release(at_mail);  // before the tile is over: it is the planner's sign for more
      at_mail.advance();
#pragma unroll
      for (int c = 0; c < S::kConsumers; ++c) {
        const int row = first + 64 * c;
        s.ring_o[c].wait_full(at_o);
        if (row < rows) carry({64, start + row, rows - row, head, batch}, c);
        s.ring_o[c].release(at_o);
      }
      at_o.advance();
    }
  }
};

}  // namespace tea::hopper
