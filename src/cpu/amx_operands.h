// What the matrix unit multiplies: keys and values packed once per kv head, the rows of a block,
// and P and dS rounded to bf16. Included by flash_amx.cpp after amx.h, inside its namespace.
#pragma once

constexpr int kGroups = kRows / kSide;

// How many tiles the operands of a problem have.
struct Sizes {
  explicit Sizes(const Problem& p)
      : deep_k(tiles_of(p.dim_qk, kDepth)),
        deep_v(tiles_of(p.v_dim(), kDepth)),
        wide_k(tiles_of(p.dim_qk, kSide)),
        wide_v(tiles_of(p.v_dim(), kSide)) {}
  int64_t deep_k, deep_v;  // along k of a product
  int64_t wide_k, wide_v;  // along rows or columns of C
};

// A packed head, by tiles: rows of K; forward: V transposed; backward: rows of V, K transposed.
struct Packed {
  Packed(const Problem& p, const Group& g, Pass pass, const std::byte* memory)
      : size(p), memory_(memory) {
    const int64_t chunks = tiles_of(g.seen.end - g.seen.begin, kDepth);
    const auto take = [&](int64_t tiles_of_a_chunk) {
      const int64_t from = bytes;
      bytes += chunks * tiles_of_a_chunk * kTileBytes;
      return from;
    };
    k_ = take(2 * size.deep_k);
    if (pass == Pass::kForward) {
      v_turned_ = take(size.wide_v);
    } else {
      v_ = take(2 * size.deep_v);
      k_turned_ = take(size.wide_k);
    }
  }
  // As A of a product, from key `first` of the head on, a multiple of kDepth.
  Tiles rows_k(int64_t first) const { return rows(k_, size.deep_k, first); }
  Tiles rows_v(int64_t first) const { return rows(v_, size.deep_v, first); }
  Tiles turned_k(int64_t first) const { return turned(k_turned_, size.wide_k, first); }
  Tiles turned_v(int64_t first) const { return turned(v_turned_, size.wide_v, first); }

  const Sizes size;
  int64_t bytes = 0;

 private:
  Tiles rows(int64_t from, int64_t deep, int64_t first) const {
    return {memory_ + from + first / kSide * deep * kTileBytes, deep * kTileBytes, kTileBytes, 64};
  }
  Tiles turned(int64_t from, int64_t wide, int64_t first) const {
    return {memory_ + from + first / kDepth * wide * kTileBytes, kTileBytes, wide * kTileBytes, 64};
  }

  const std::byte* const memory_;
  int64_t k_ = 0, v_ = 0, k_turned_ = 0, v_turned_ = 0;  // where each begins
};

int64_t packed_bytes(const Problem& p, const Group& g, Pass pass) {
  return Packed(p, g, pass, nullptr).bytes;
}

std::byte* writable(Tiles t) { return static_cast<std::byte*>(const_cast<void*>(t.data)); }

void pack_head(const View& view, const Group& g, Pass pass, int64_t first, std::byte* memory) {
  const Problem& p = view.p;
  const Packed packed(p, g, pass, memory);
  const RowsOf of_k = view.rows(TEA_K), of_v = view.rows(TEA_V);
  const int64_t end = std::min(first + kPackedKeys, g.seen.end - g.seen.begin);
  for (int64_t j = first; j < end; j += kDepth) {
    const uint16_t *k[kDepth]{}, *v[kDepth]{};
    for (int64_t i = 0; i < std::min<int64_t>(kDepth, end - j); ++i) {
      const RowAt at{g.kv, g.b, g.kv_head, g.seen.begin + j + i};
      k[i] = static_cast<const uint16_t*>(view.address(of_k, at));
      v[i] = static_cast<const uint16_t*>(view.address(of_v, at));
    }
    for (int half = 0; half < 2; ++half) {
      pack_rows(k + half * kSide, p.dim_qk, writable(packed.rows_k(j + half * kSide)));
      if (pass == Pass::kBackward)
        pack_rows(v + half * kSide, p.v_dim(), writable(packed.rows_v(j + half * kSide)));
    }
    if (pass == Pass::kBackward)
      pack_transposed(k, p.dim_qk, writable(packed.turned_k(j)));
    else
      pack_transposed(v, p.v_dim(), writable(packed.turned_v(j)));
  }
}

// Where the rows of a block begin; those that see nothing count as zero.
struct BlockRows {
  BlockRows(const View& view, const RowBlock& block, tea_tensor t) {
    const RowsOf of = view.rows(t);
    for (int lane = 0; lane < kRows; ++lane)
      row[lane] = block.sees(lane) ? static_cast<const uint16_t*>(view.address(of, block.at(lane)))
                                   : nullptr;
  }
  const uint16_t* row[kRows];
};

// The rows of a block as the columns of B, [tile of k][16 rows].
void pack_block(const BlockRows& rows, int64_t dim, std::byte* to) {
  for (int group = 0; group < kGroups; ++group)
    pack_columns(rows.row + group * kSide, dim, to + group * kTileBytes, kGroups * kTileBytes);
}
Tiles block_columns(const std::byte* packed) {
  return {packed, kTileBytes, kGroups * kTileBytes, 64};
}
