// Backward on the matrix unit. Included by flash_amx.cpp after amx_operands.h, inside its
// namespace.
#pragma once

constexpr int kStep = 128;  // keys of one step of backward

// One block of rows on its way over the keys, which adds to the gradients.
class WalkBack {
 public:
  WalkBack(const View& view, const RowBlock& block, Gradients<float>& g, float* scratch)
      : p_(view.p),
        block_(block),
        g_(g),
        scale_(static_cast<float>(p_.scale_value())),
        t_(view, block, block.all, scratch),
        packed_(p_, block.group, Pass::kBackward, block.group.packed) {
    s_ = scratch + scratch_reals<float>(p_);
    dp_ = s_ + kStep * kRows;
    auto* at = reinterpret_cast<std::byte*>(dp_ + kStep * kRows);
    const auto take = [&](int64_t bytes) {
      std::byte* from = at;
      at += bytes;
      return from;
    };
    probs_ = take(kStep * kRows * 2), ds_ = take(kStep * kRows * 2);
    ds_pairs_ = take(kStep * kRows * 2);
    const Sizes& n = packed_.size;
    q_ = take(n.deep_k * kGroups * kTileBytes), dout_ = take(n.deep_v * kGroups * kTileBytes);
    q_pairs_ = take(n.wide_k * 2 * kTileBytes), dout_pairs_ = take(n.wide_v * 2 * kTileBytes);
    load_rows(view);
  }

  static int64_t scratch(const Problem& p) {
    const Sizes n(p);
    const int64_t tiles = (n.deep_k + n.deep_v) * kGroups + (n.wide_k + n.wide_v) * 2;
    return scratch_reals<float>(p) + 2 * kStep * kRows + 3 * kStep * kRows / 2 +
           tiles * kTileBytes / 4;
  }

  void operator()() {
    const int64_t base = block_.group.seen.begin;
    const Sizes& n = packed_.size;
    for (int64_t j = (block_.all.begin - base) / kDepth * kDepth; base + j < block_.all.end;
         j += kStep) {
      first_ = base + j, keys_ = std::min<int64_t>(kStep, block_.all.end - first_);
      const int64_t tiles = tiles_of(keys_, kSide), chunks = tiles_of(keys_, kDepth);
      const int64_t rows = deep(), dk = t_.dim_k(), dv = t_.dim_v();
      Product{tiles, 2 * rows, n.deep_k, packed_.rows_k(j), block_columns(q_), s_, kRows, false}();
      Product{tiles, 2 * rows, n.deep_v, packed_.rows_v(j), block_columns(dout_),
              dp_,   kRows,    false}();
      gradients();
      const Tiles p{probs_, kSide * kRows * 2, 64, kRows * 2};
      const Tiles ds{ds_, kSide * kRows * 2, 64, kRows * 2};
      const Tiles ds_pairs{ds_pairs_, kSide * 4, kDepth / 2 * kRows * 4, kRows * 4};
      Product{tiles, n.wide_v, rows, p, pairs(dout_pairs_, n.wide_v), g_.dv + first_ * dv,
              dv,    true}();
      Product{tiles, n.wide_k, rows, ds, pairs(q_pairs_, n.wide_k), g_.dk + first_ * dk,
              dk,    true}();
      Product{n.wide_k, 2 * rows, chunks, packed_.turned_k(j), ds_pairs, t_.dq, kRows, true}();
    }
  }

  const float* dq() const { return t_.dq; }

 private:
  // Tiles of k along the rows, 32 at a time. Rows without anything to see have P = dS = 0.
  int64_t deep() const { return tiles_of(t_.lanes(), kDepth); }

  static Tiles pairs(const std::byte* from, int64_t wide) {
    return {from, kTileBytes, wide * kTileBytes, 64};
  }

  void load_rows(const View& view) {
    const BlockRows q(view, block_, TEA_Q), dout(view, block_, TEA_DOUT);
    pack_block(q, p_.dim_qk, q_);
    pack_block(dout, p_.v_dim(), dout_);
    for (int half = 0; half < 2; ++half) {
      const int64_t k = half * packed_.size.wide_k, v = half * packed_.size.wide_v;
      pack_pairs(q.row + half * kDepth, p_.dim_qk, q_pairs_ + k * kTileBytes);
      pack_pairs(dout.row + half * kDepth, p_.v_dim(), dout_pairs_ + v * kTileBytes);
    }
    const Subnormals kept(true);  // as in the other sets: delta is as exact as there
    t_.load_queries(TEA_DOUT, 1, p_.v_dim(), t_.dim_v(), t_.dout_rows);
    row_sums(view, block_, t_, g_.dsink);
    std::fill_n(t_.dq, t_.dim_k() * kRows, 0.0f);
  }

  // P and dS of the step, as operands.
  void gradients() {
    for (int64_t j = 0; j < keys_; j += kCols) {
      t_.s = s_ + j * kRows, t_.dp = dp_ + j * kRows;
      t_.move(first_ + j, first_ + std::min<int64_t>(j + kCols, keys_));
      if (!t_.is_plain()) t_.logits(p_.softcap > 0);
      if (p_.drops()) t_.dropout();
      store_tile_rows(j);
    }
  }

  TEA_INLINE Pair<float> element(int64_t j, int lane) const {
    const float factor = t_.is_plain() ? scale_ : 1;  // logits may be in place already
    const VF x = load(t_.s + j * kRows + lane) * factor - load(t_.lse + lane);
    Pair<float> out = gradient_of_logit(p_, t_, power_of_two(x * kLog2e), lane, j);
    out.dx = before_scale(p_, t_, out.dx, scale_, lane, j);
    return out;
  }

  // 32 rows of two keys at a time; keys that complete a tile of k are zero.
  void store_tile_rows(int64_t first) {
    const int64_t whole = tiles_of(t_.cols, kDepth) * kDepth;
    for (int lane = 0; lane < deep() * kDepth; lane += kDepth)
      for (int64_t j = 0; j < whole; j += 2) {
        Pair<float> at[2][2];
#pragma GCC unroll 2
        for (int key = 0; key < 2; ++key)
#pragma GCC unroll 2
          for (int half = 0; half < 2; ++half)
            at[key][half] =
                j + key < t_.cols ? element(j + key, lane + half * kSide) : Pair<float>{VF{}, VF{}};
        for (int key = 0; key < 2; ++key) {
          const int64_t to = ((first + j + key) * kRows + lane) * 2;
          _mm512_store_si512(probs_ + to, joined(at[key][0].p, at[key][1].p));
          _mm512_store_si512(ds_ + to, joined(at[key][0].dx, at[key][1].dx));
        }
        for (int half = 0; half < 2; ++half)
          _mm512_store_si512(ds_pairs_ + ((first + j) / 2 * kRows + lane + half * kSide) * 4,
                             as_pairs(at[0][half].dx, at[1][half].dx));
      }
  }

  const Problem& p_;
  const RowBlock& block_;
  Gradients<float>& g_;
  const float scale_;
  Tile<float> t_;
  const Packed packed_;
  float *s_, *dp_;                                 // [key][row] of the step
  std::byte *probs_, *ds_, *ds_pairs_;             // P and dS as A, dS as B
  std::byte *q_, *dout_, *q_pairs_, *dout_pairs_;  // as B, along their elements or rows
  int64_t first_ = 0, keys_ = 0;                   // of the step
};
