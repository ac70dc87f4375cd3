// The workspace of a backward run: what its kernels pass to each other in global memory.
//
// Accumulators are stored in units of 64 x 64 floats, in the order in which the registers of a
// consumer warpgroup hold them: float4 j of thread t is at 4 * (128 j + t). A row block of dQ is
// two units: its halves of columns where block_m is 64, its halves of rows where block_m is 128.
#pragma once
#include <cstdint>

#include "hopper/backward/config.h"

namespace tea::hopper::backward {

inline constexpr int kUnitFloats = 64 * 64, kUnitBytes = 4 * kUnitFloats;

// The row blocks of all sequences, or their key blocks. A sequence of a ragged tensor has the
// blocks from cu_seqlens / block + its number on, so that no two sequences share one.
struct Blocks {
  int64_t per_head;  // blocks of one head of all sequences
  int32_t of_dense;  // blocks of a sequence that is not ragged

  TEA_HOST_DEVICE int64_t first(const SequenceLayout& layout, int block, int64_t batch,
                                int64_t length) const {
    if (layout.form != TEA_RAGGED) return batch * of_dense;
    const int64_t start = layout.cu_seqlens[batch], last = layout.tokens - length;
    return (start < 0 ? 0 : start > last ? last : start) / block + batch;
  }
};
inline Blocks make_blocks(const SequenceLayout& layout, int block, int64_t batch) {
  const int64_t dense = (layout.max_seqlen + block - 1) / block;
  return {layout.form == TEA_RAGGED ? layout.tokens / block + batch + 1 : batch * dense,
          static_cast<int32_t>(dense)};
}

struct Workspace {
  float* statistics;  // [heads_q][row block][2][block_m]: LSE * log2(e), then delta
  float* dq;          // [heads_q][row block][2] units
  float* dkv;         // [heads_kv][key block][2 * dim / 64][2] units, used if groups have parts
  // How many contributions a pair of units has received: of dq, then of dkv.
  uint32_t *dq_order, *dkv_order;
  int32_t* next_tile;
  Blocks row_blocks, key_blocks;
  int64_t counters;  // elements of dq_order, dkv_order and next_tile, which are adjacent
  uint64_t bytes;
};

// The key blocks of all key heads for which dK and dV may have to be accumulated in memory, if
// groups of query heads can be divided at all: few tiles have few blocks. The number never
// decreases with the lengths, although parts do, so that memory for the longest run serves every
// shorter one.
inline int64_t accumulated_key_blocks(const AttentionArguments& a, const Blocks& key_blocks) {
  if (a.heads_q / a.heads_kv % 2) return 0;
  const int64_t most = kEnoughTiles + (std::max<int64_t>(a.batch, 1) + 1) * a.heads_kv;
  return std::min(key_blocks.per_head * a.heads_kv, most);
}

// With memory == nullptr only the sizes are meaningful.
inline Workspace make_workspace(const AttentionArguments& a, int tile, void* memory) {
  const int block_m = kTiles[tile].block_m, dim = kTiles[tile].dim;
  const int64_t batch = std::max<int64_t>(a.batch, 1);
  Workspace w{};
  w.row_blocks = make_blocks(a.queries, block_m, batch);
  w.key_blocks = make_blocks(a.keys, kBlockN, batch);
  const int64_t row_blocks = w.row_blocks.per_head * a.heads_q;
  const int64_t dkv_pairs = accumulated_key_blocks(a, w.key_blocks) * 2 * (dim / 64);
  char* at = static_cast<char*>(memory);
  const auto take = [&](int64_t bytes) {
    char* const taken = at + w.bytes;
    w.bytes += (static_cast<uint64_t>(bytes) + 255) / 256 * 256;
    return static_cast<void*>(memory ? taken : nullptr);
  };
  w.counters = row_blocks + dkv_pairs + 1;
  w.dq = static_cast<float*>(take(row_blocks * 2 * kUnitBytes));
  w.dkv = static_cast<float*>(take(dkv_pairs * 2 * kUnitBytes));
  w.statistics = static_cast<float*>(take(row_blocks * 2 * block_m * 4));
  w.dq_order = static_cast<uint32_t*>(take(w.counters * 4));
  w.dkv_order = w.dq_order + (memory ? row_blocks : 0);
  w.next_tile = reinterpret_cast<int32_t*>(w.dkv_order + (memory ? dkv_pairs : 0));
  return w;
}

}  // namespace tea::hopper::backward
