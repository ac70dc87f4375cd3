// The kernel for multi-head latent attention (MLA) at decoding, as DeepSeek's models use it: head
// dimensions of 576 for Q and K and 512 for V, many query heads on one head of K and V.
#pragma once
#include "hopper/decode/config.h"

namespace tea::hopper::decode::mla {

inline constexpr int kMinDim = 513, kDim = 576,
                     kDimV = 512;   // smaller ones are filled up with zeros
inline constexpr int kBlockM = 64;  // packed rows of a tile
inline constexpr BlockShape kBlockShape = {.keys = 64, .min_share = 4};
// Of a sequence and a head of K and V: each 64 read all its keys again.
inline constexpr int64_t kMaxRows = 1024;

// The descriptor of a tile of which several CTAs have computed parts, written by the CTA with the
// last part. The other parts are in the slots of preceding CTAs, every `tiles_at_once`-th one.
struct DividedTile {
  int batch, tile;
  int cta, parts;  // no parts: the CTA has no last part of a divided tile
};
// The workspace has such a descriptor for each CTA, then two slots for each: for a part that ends a
// tile, and for one that does not. A slot has the unnormalised O of a tile, row by row, and the
// maximum and the sum of each row.
inline constexpr int64_t kSlotFloats = slot_floats(kBlockM, kDimV);
inline int64_t divided_tile_bytes(int ctas) {
  return (int64_t{ctas} * int64_t{sizeof(DividedTile)} + 2047) / 2048 * 2048;
}
inline uint64_t workspace_bytes(int ctas) {
  return ctas < 2 ? 0
                  : static_cast<uint64_t>(divided_tile_bytes(ctas) + 2 * ctas * kSlotFloats * 4);
}

inline bool serves_dims(int64_t dim_qk, int64_t dim_v) {
  return dim_qk >= kMinDim && dim_qk <= kDim && dim_v <= kDimV;
}
inline bool serves_dims(const AttentionArguments& a) { return serves_dims(a.dim_qk, a.dim_v); }
// The tiles of a head of K and V, of at most kMaxRows rows.
inline int row_tiles(const AttentionArguments& a) {
  const int64_t rows = std::min(packed_rows(a), kMaxRows);
  return static_cast<int>((rows + kBlockM - 1) / kBlockM);
}

// Whether V is the first columns of K, which are then loaded once.
inline bool shares_kv(const AttentionArguments& a) {
  const auto same = [](const PageTable& k, const PageTable& v) {
    return k.entries == v.entries && k.stride == v.stride;
  };
  return a.k.data == a.v.data && a.k.batch == a.v.batch && a.k.seq == a.v.seq &&
         a.k.head == a.v.head && a.dim_v <= a.dim_qk && same(a.page_table_k, a.page_table_v);
}

// The rows of a box of a tensor map: as many as are always within a page. Without a window, boxes
// start at multiples of their height. 1: rows are gathered by cp.async instead.
inline constexpr int kMinBoxRows = 16;
inline int box_rows(const AttentionArguments& a) {
  if (a.keys.form != TEA_PAGED) return kBlockShape.keys;
  if (a.mask.window_left) return 1;
  return a.keys.page_size % 64 == 0 ? 64 : a.keys.page_size % kMinBoxRows == 0 ? kMinBoxRows : 1;
}

}  // namespace tea::hopper::decode::mla
