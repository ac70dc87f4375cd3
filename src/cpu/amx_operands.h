// Operands of AMX products: keys and values packed once per kv head, and the rows of a block.
// Included by flash_amx.cpp after amx.h, inside its namespace.
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

// With T terms elements are bf16 (one) or fp32 (three).
template <int T>
using Element = std::conditional_t<T == 1, uint16_t, float>;

// Reads term t of rows.
template <int T, int t>
auto rows_of(float factor = 1) {
  if constexpr (T == 1)
    return Bf16Rows{};
  else
    return Fp32Rows<t>{factor};
}

template <int T, class Body>
TEA_PRIMITIVE void each_term(Body&& body) {
  [&]<int... t>(std::integer_sequence<int, t...>) { (body(Number<t>{}), ...); }
  (std::make_integer_sequence<int, T>{});
}

// dS is multiplied by 1 / kSmall, and what meets it by kSmall, so that the lesser terms of a small
// dS are not lost as subnormal.
constexpr float kSmall = 0x1p-30f;

// Whether three terms hold a row exactly, also times kSmall, and no product of its terms with those
// of another such row leaves the normal numbers of fp32: no NaN, and nothing but zero outside of
// [2^-45, 2^20].
bool is_ordinary(const uint16_t*, int64_t) { return true; }
[[maybe_unused]] bool is_ordinary(const float* row, int64_t n) {
  constexpr uint32_t kLeast = (127 - 45) << 23, kMost = (127 + 20) << 23;
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF), least = _mm512_set1_epi32(kLeast);
  const __m512i range = _mm512_set1_epi32(kMost - kLeast);
  __mmask16 odd = 0;
  for (int64_t from = 0; row && from < n; from += kSide) {
    const __m512i x =
        _mm512_and_si512(_mm512_maskz_loadu_epi32(first_16(from, n), row + from), magnitude);
    odd |= _mm512_mask_cmpgt_epu32_mask(_mm512_test_epi32_mask(x, x), _mm512_sub_epi32(x, least),
                                        range);
  }
  return odd == 0;
}

constexpr std::byte kOrdinaryK{1}, kOrdinaryV{2};

// A packed head, by tiles: rows of K; forward: V transposed; backward: rows of V, K transposed. Of
// several terms one after the other. Then a byte for every kDepth keys: which are ordinary.
template <int T>
struct Packed {
  Packed(const Problem& p, const Group& g, Pass pass, const std::byte* memory)
      : size(p), memory_(memory), chunks_(tiles_of(g.visible.end - g.visible.begin, kDepth)) {
    const auto take = [&](int64_t tiles_of_a_chunk) {
      const int64_t from = term_;
      term_ += chunks_ * tiles_of_a_chunk * kTileBytes;
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
  int64_t bytes() const { return T * term_ + tiles_of(chunks_, 64) * 64; }

  // As A of a product, from key `first` of the head on, a multiple of kDepth.
  Tiles rows_k(int64_t first) const { return rows(k_, size.deep_k, first); }
  Tiles rows_v(int64_t first) const { return rows(v_, size.deep_v, first); }
  Tiles turned_k(int64_t first) const { return turned(k_turned_, size.wide_k, first); }
  Tiles turned_v(int64_t first) const { return turned(v_turned_, size.wide_v, first); }

  // kOrdinaryK and kOrdinaryV of keys [first, first + kDepth).
  const std::byte* ordinary(int64_t first) const { return memory_ + T * term_ + first / kDepth; }
  bool is_ordinary(Columns keys, std::byte side) const {
    for (int64_t j = keys.begin / kDepth * kDepth; j < keys.end; j += kDepth)
      if ((*ordinary(j) & side) == std::byte{0}) return false;
    return true;
  }

  const Sizes size;

 private:
  Tiles rows(int64_t from, int64_t deep, int64_t first) const {
    return {memory_ + from + first / kSide * deep * kTileBytes, deep * kTileBytes, kTileBytes, 64,
            term_};
  }
  Tiles turned(int64_t from, int64_t wide, int64_t first) const {
    return {memory_ + from + first / kDepth * wide * kTileBytes, kTileBytes, wide * kTileBytes, 64,
            term_};
  }

  const std::byte* const memory_;
  const int64_t chunks_;
  int64_t term_ = 0;                                     // bytes of one
  int64_t k_ = 0, v_ = 0, k_turned_ = 0, v_turned_ = 0;  // where each begins
};

template <int T>
int64_t packed_bytes(const Problem& p, const Group& g, Pass pass) {
  return Packed<T>(p, g, pass, nullptr).bytes();
}

std::byte* writable(const void* at) { return static_cast<std::byte*>(const_cast<void*>(at)); }
std::byte* writable(const Tiles& tiles, int term) { return writable(tiles.at(0, 0, term)); }

template <int T>
void pack_head(const View& view, const Group& g, Pass pass, int64_t first, std::byte* memory) {
  const Problem& p = view.p;
  const Packed<T> packed(p, g, pass, memory);
  const RowsOf of_k = view.rows(TEA_K), of_v = view.rows(TEA_V);
  const int64_t end = std::min(first + kPackedKeys, g.visible.end - g.visible.begin);
  for (int64_t j = first; j < end; j += kDepth) {
    const Element<T>*k[kDepth]{}, *v[kDepth]{};
    std::byte ordinary = kOrdinaryK | kOrdinaryV;
    for (int64_t i = 0; i < std::min<int64_t>(kDepth, end - j); ++i) {
      const RowAt at{g.kv, g.b, g.kv_head, g.visible.begin + j + i};
      k[i] = static_cast<const Element<T>*>(view.address(of_k, at));
      v[i] = static_cast<const Element<T>*>(view.address(of_v, at));
      if (!is_ordinary(k[i], p.dim_qk)) ordinary &= ~kOrdinaryK;
      if (!is_ordinary(v[i], p.v_dim())) ordinary &= ~kOrdinaryV;
    }
    *writable(packed.ordinary(j)) = ordinary;
    each_term<T>([&]<int t>(Number<t>) {
      const auto rows = rows_of<T, t>();
      for (int half = 0; half < 2; ++half) {
        const int64_t at = j + half * kSide;
        pack_rows(rows, k + half * kSide, p.dim_qk, writable(packed.rows_k(at), t));
        if (pass == Pass::kBackward)
          pack_rows(rows, v + half * kSide, p.v_dim(), writable(packed.rows_v(at), t));
      }
      if (pass == Pass::kBackward)
        pack_transposed(rows_of<T, t>(kSmall), k, p.dim_qk, writable(packed.turned_k(j), t));
      else
        pack_transposed(rows, v, p.v_dim(), writable(packed.turned_v(j), t));
    });
  }
}

// The addresses of a block's rows; rows without a visible key count as zero.
template <int T>
struct BlockRows {
  BlockRows(const View& view, const RowBlock& block, tea_tensor t, int64_t elements)
      : dim(elements) {
    const RowsOf of = view.rows(t);
    for (int lane = 0; lane < kRows; ++lane) {
      row[lane] = block.sees(lane)
                      ? static_cast<const Element<T>*>(view.address(of, block.at(lane)))
                      : nullptr;
      ordinary &= is_ordinary(row[lane], dim);
    }
  }
  const Element<T>* row[kRows];
  const int64_t dim;
  bool ordinary = true;
};

// The rows of a block as the columns of B, [term][tile of k][16 rows].
template <int T>
Tiles pack_block(const BlockRows<T>& rows, std::byte* to) {
  const int64_t term = tiles_of(rows.dim, kDepth) * kGroups * kTileBytes;
  each_term<T>([&]<int t>(Number<t>) {
    for (int group = 0; group < kGroups; ++group)
      pack_columns(rows_of<T, t>(), rows.row + group * kSide, rows.dim,
                   to + t * term + group * kTileBytes, kGroups * kTileBytes);
  });
  return {to, kTileBytes, kGroups * kTileBytes, 64, term};
}

// The rows of a block times `factor` as B, in pairs of adjacent rows, [term][32 rows][16 columns].
template <int T>
Tiles pack_block_pairs(const BlockRows<T>& rows, float factor, std::byte* to) {
  const int64_t half = tiles_of(rows.dim, kSide) * kTileBytes, term = kRows / kDepth * half;
  each_term<T>([&]<int t>(Number<t>) {
    for (int i = 0; i < kRows / kDepth; ++i)
      pack_pairs(rows_of<T, t>(factor), rows.row + i * kDepth, rows.dim, to + t * term + i * half);
  });
  return {to, kTileBytes, half, 64, term};
}

// The scores of a block by AMX; vector code computes the rest. They are the same in both passes,
// for any V, dO and O.
template <int T>
struct UnitScores {
  Tiles keys, queries;
  int64_t steps, base;  // base: the first key of the packed head
  bool ordinary;        // whether Q and K are

  // The tile that has this column begins here.
  int64_t first(int64_t column) const { return base + (column - base) / kDepth * kDepth; }

  void operator()(Tile<float>& t, bool wants_cap_slope) const {
    Tiles k = keys;
    k.data = keys.at((t.first - base) / kSide);
    Product<T>{tiles_of(t.cols, kSide), t.lanes() / kSide, steps, k, queries, t.s, kRows, false}();
    t.logits(wants_cap_slope);
  }
};
