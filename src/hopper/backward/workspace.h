// The workspace of a backward run: what its kernels pass to each other in global memory.
//
// Accumulators are stored in units of 64 x 64 floats, in the order in which the registers of a
// consumer warpgroup hold them: float4 j of thread t is at 4 * (128 j + t). A row block of dQ is
// two units: its halves of columns where block_m is 64, its halves of rows where block_m is 128.
#pragma once
#include <cstdint>

#include "hopper/backward/interleaving.h"
#include "hopper/backward/term_tasks.h"

namespace tea::hopper::backward {

inline constexpr int kUnitFloats = 64 * 64, kUnitBytes = 4 * kUnitFloats;

// The floats of the two units of dQ that a row block of a head has. Of the second one only the
// columns up to `dim` are kept, which come first in it.
constexpr int second_unit_floats(const TileConfig& c) {
  return c.block_m == 128 ? kUnitFloats : 64 * (c.dim - 64);
}
constexpr int dq_pair_floats(const TileConfig& c) { return kUnitFloats + second_unit_floats(c); }

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

// A pair of units that has received its last contribution, to be converted. The second unit has the
// next 64 rows or the next 64 columns. Rows and columns beyond `rows` and `columns` are not stored.
struct CompletedPair {
  const float* from;
  void* to;
  int64_t row_stride;
  int rows, columns;
  float factor;
  bool by_rows;
  bool adds;            // to what is there
  uint32_t* converted;  // counts units whose sums have been read; null if no tile waits for it
};

// The queue of completed pairs. It is shared by all CTAs, because the tile of a head that
// contributes last may complete all of its rows, and its own CTA could not convert these as fast.
struct CompletedQueue {
  CompletedPair* pairs;
  uint32_t* published;  // of each pair: 1 when it can be read
  uint32_t *tail, *next_unit;
  uint32_t* finished;  // store warps that have finished a tile, over all tiles
  int64_t capacity;    // pairs
};

// The terms that the products of a step add to the scores of a row, -LSE / scale, and to the
// gradients of its probabilities, -delta. Each is twice the sum of three bf16 numbers, which
// together have the 24 bits of a float, because the product adds them twice
// (Mainloop::gemm_scores). The fourth is 0.
struct alignas(16) RowTerms {
  uint2 score, gradient;
};

struct Workspace {
  RowTerms* terms;  // [heads_q][row block][block_m]
  float* dq;        // [heads_q][row block][dq_pair_floats()], or with dq_heads [head][row block]
  // Query heads of all sequences whose sums of dQ have memory of their own; 0: all heads have. The
  // others, which are the last ones, use the memory of the first heads once these are converted.
  int32_t dq_heads;
  uint32_t* dq_converted;   // [first heads][row block]
  uint32_t* terms_written;  // rows that are done of each task of the preprocess kernel (TermTasks)
  float* dkv;  // [heads_kv][key block][2 * units_per_row][2] units, used if groups have parts
  // How many contributions a pair of units has received: of dq, then of dkv.
  uint32_t *dq_order, *dkv_order;
  CompletedQueue completed;
  uint32_t* next_tile;
  Blocks row_blocks, key_blocks;
  int64_t counters;  // all uint32_t of the workspace, from dq_order on, which start at zero
  uint64_t bytes;
};

// The key blocks of all key heads for which dK and dV may have to be accumulated in memory, if
// groups of query heads can be divided at all: few tiles have few blocks. The number never
// decreases with the lengths, although parts do, so that memory for the longest run serves every
// shorter one.
inline int64_t accumulated_key_blocks(const AttentionArguments& a, const Blocks& key_blocks) {
  const int group = a.heads_q / a.heads_kv;
  if (group % 2) return 0;
  if (group > kMostHeadsPerTile) return key_blocks.per_head * a.heads_kv;
  const int64_t most = kEnoughTiles + (std::max<int64_t>(a.batch, 1) + 1) * a.heads_kv;
  return std::min(key_blocks.per_head * a.heads_kv, most);
}

// Where all sequences have the same length, one query head in 32 needs no memory for its sums of
// dQ. A tile waits for the conversion of the sums that were there, and so for all tiles of another
// head. These must have lower numbers, and should have ended long before: the numbers of the
// two heads differ by at least twice the heads that are interleaved, which is known for few
// sequences only if they are long. The bytes never decrease with the lengths or the sequences.
struct SumsOfDq {
  int32_t own_heads;  // Workspace::dq_heads
  int64_t blocks;     // of all heads that have memory
};
inline SumsOfDq sums_of_dq(const AttentionArguments& a, int tile, int64_t batch,
                           const Blocks& row_blocks) {
  constexpr int kLong = 32, kMostInterleaved = 32;
  const int64_t heads = batch * a.heads_q, all = row_blocks.per_head * a.heads_q;
  const int64_t of_dense = row_blocks.of_dense;
  if (a.queries.form != TEA_DENSE || a.keys.form != TEA_DENSE || heads == 0) return {0, all};
  const int group = a.heads_q / a.heads_kv, parts = group_parts(a);
  const int64_t own = heads - heads / 32, per_tile = most_heads_per_tile(group);
  const int64_t many = std::max(own, (2 * kMostInterleaved + 2) * per_tile);
  if (many < heads) return {static_cast<int32_t>(many), many * of_dense};
  const int64_t together = int64_t{interleave(a, tile, parts).heads_at_once} * (group / parts);
  if (own < heads && of_dense > kLong && 2 * together <= own)
    return {static_cast<int32_t>(own), std::max(own * of_dense, heads * kLong)};
  return {0, all};
}

// With memory == nullptr only the sizes are meaningful.
inline Workspace make_workspace(const AttentionArguments& a, int tile, void* memory) {
  const int block_m = kTiles[tile].block_m, dim = kTiles[tile].dim;
  const int64_t batch = std::max<int64_t>(a.batch, 1);
  Workspace w{};
  w.row_blocks = make_blocks(a.queries, block_m, batch);
  w.key_blocks = make_blocks(a.keys, kBlockN, batch);
  const int64_t row_blocks = w.row_blocks.per_head * a.heads_q;
  const int64_t dkv_pairs = accumulated_key_blocks(a, w.key_blocks) * 2 * units_per_row(dim);
  char* at = static_cast<char*>(memory);
  const auto take = [&](int64_t bytes) {
    char* const taken = at + w.bytes;
    w.bytes += (static_cast<uint64_t>(bytes) + 255) / 256 * 256;
    return static_cast<void*>(memory ? taken : nullptr);
  };
  const int64_t pairs = row_blocks + dkv_pairs;
  w.counters = 2 * pairs + 4;
  const SumsOfDq sums = sums_of_dq(a, tile, batch, w.row_blocks);
  w.dq_heads = sums.own_heads;
  w.dq = static_cast<float*>(take(sums.blocks * 4 * dq_pair_floats(kTiles[tile])));
  w.dq_converted = static_cast<uint32_t*>(take(row_blocks / 32 * 4));  // at most
  w.terms_written = static_cast<uint32_t*>(take(term_flags(a, block_m) * 4));
  w.dkv = static_cast<float*>(take(dkv_pairs * 2 * kUnitBytes));
  w.terms = static_cast<RowTerms*>(take(row_blocks * block_m * sizeof(RowTerms)));
  w.completed.pairs = static_cast<CompletedPair*>(take(pairs * sizeof(CompletedPair)));
  w.completed.capacity = pairs;
  w.dq_order = static_cast<uint32_t*>(take(w.counters * 4));
  if (!memory) return w;
  w.dkv_order = w.dq_order + row_blocks;
  w.completed.published = w.dkv_order + dkv_pairs;
  uint32_t* const scalars = w.completed.published + pairs;
  w.completed.tail = scalars, w.completed.next_unit = scalars + 1;
  w.completed.finished = scalars + 2, w.next_tile = scalars + 3;
  return w;
}

}  // namespace tea::hopper::backward
