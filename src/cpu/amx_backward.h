// Backward with AMX. Included by flash_amx.cpp after amx_operands.h, inside its
// namespace.
#pragma once

constexpr int kStep = 128;  // keys of one step of backward

// Processes the keys for one block of rows and adds to the gradients.
template <int T>
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
      at += T * bytes;
      return from;
    };
    probs_ = take(kStepBytes), ds_ = take(kStepBytes), ds_pairs_ = take(kStepBytes);
    const BlockRows<T> q(view, block_, TEA_Q, p_.dim_qk), dout(view, block_, TEA_DOUT, p_.v_dim());
    const Sizes& n = packed_.size;
    q_ = pack_block(q, take(n.deep_k * kGroups * kTileBytes));
    dout_ = pack_block(dout, take(n.deep_v * kGroups * kTileBytes));
    q_pairs_ = pack_block_pairs(q, kSmall, take(n.wide_k * 2 * kTileBytes));
    dout_pairs_ = pack_block_pairs(dout, 1, take(n.wide_v * 2 * kTileBytes));
    const int64_t first = block.group.visible.begin;
    const Columns visible{block.all.begin - first, block.all.end - first};
    scores_ = {packed_.rows_k(0), q_, n.deep_k, first,
               q.ordinary && packed_.is_ordinary(visible, kOrdinaryK)};
    load_rows(view);
    ordinary_ = T == 1 || (scores_.ordinary && dout.ordinary && is_moderate() &&
                           packed_.is_ordinary(visible, kOrdinaryV));
  }

  static int64_t scratch(const Problem& p) {
    const Sizes n(p);
    const int64_t tiles = (n.deep_k + n.deep_v) * kGroups + (n.wide_k + n.wide_v) * 2;
    return scratch_reals<float>(p) + 2 * kStep * kRows +
           T * (3 * kStepBytes + tiles * kTileBytes) / 4;
  }

  // Whether the products of the operands' terms are exact.
  bool is_ordinary() const { return ordinary_; }
  const UnitScores<T>& unit_scores() const { return scores_; }

  void operator()() {
    add_dsink();
    const int64_t base = block_.group.visible.begin;
    const Sizes& n = packed_.size;
    for (int64_t j = (block_.all.begin - base) / kDepth * kDepth; base + j < block_.all.end;
         j += kStep) {
      first_ = base + j, keys_ = std::min<int64_t>(kStep, block_.all.end - first_);
      const int64_t tiles = tiles_of(keys_, kSide), chunks = tiles_of(keys_, kDepth);
      const int64_t rows = deep(), dk = t_.dim_k(), dv = t_.dim_v();
      using Sum = Product<T>;
      Sum{tiles, 2 * rows, n.deep_k, packed_.rows_k(j), q_, s_, kRows, false}();
      Sum{tiles, 2 * rows, n.deep_v, packed_.rows_v(j), dout_, dp_, kRows, false}();
      gradients();
      const Tiles p{probs_, kSide * kRows * 2, 64, kRows * 2, kStepBytes};
      const Tiles ds{ds_, kSide * kRows * 2, 64, kRows * 2, kStepBytes};
      const Tiles ds_pairs{ds_pairs_, kSide * 4, kDepth / 2 * kRows * 4, kRows * 4, kStepBytes};
      Sum{tiles, n.wide_v, rows, p, dout_pairs_, g_.dv + first_ * dv, dv, true}();
      Sum{tiles, n.wide_k, rows, ds, q_pairs_, g_.dk + first_ * dk, dk, true}();
      Sum{n.wide_k, 2 * rows, chunks, packed_.turned_k(j), ds_pairs, t_.dq, kRows, true}();
    }
  }

  const float* dq() const { return t_.dq; }

 private:
  static constexpr int64_t kStepBytes = int64_t{kStep} * kRows * 2;  // P or dS of a step, one term

  // Tiles of k along the rows, 32 at a time. Rows without a visible key have P = dS = 0.
  int64_t deep() const { return tiles_of(t_.lanes(), kDepth); }

  void load_rows(const View& view) {
    const Subnormals kept(true);  // as in the other sets: delta is as exact as there
    t_.load_queries(TEA_DOUT, 1, p_.v_dim(), t_.dim_v(), t_.dout_rows);
    std::fill_n(dsink_, kRows, 0.0);
    row_sums(view, block_, t_, dsink_);
    std::fill_n(t_.dq, t_.dim_k() * kRows, 0.0f);
  }

  void add_dsink() {
    for (int lane = 0; lane < kRows; ++lane) g_.dsink[lane] += dsink_[lane];
  }

  // Whether dS / kSmall stays in the range of fp32; not where NaN is.
  bool is_moderate() const {
    float most = 0;
    bool known = true;
    for (int lane = 0; lane < kRows; ++lane) {
      const float delta = std::fabs(t_.delta[lane]);
      known &= delta == delta, most = std::max(most, delta);
    }
    const float scale = std::fabs(scale_);
    return known && scale <= 0x1p10f && most * scale < 0x1p80f;
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

  struct Operands {
    Terms<T> p, ds;
  };

  TEA_INLINE Operands element(int64_t j, int lane) const {
    if (j >= t_.cols) return {Terms<T>(VF{}), Terms<T>(VF{})};
    const float factor = t_.is_plain() ? scale_ : 1;  // logits may be in place already
    const VF x = logit_of(load(t_.s + j * kRows + lane), splat(factor)) - load(t_.lse + lane);
    const Pair<float> at = gradient_of_logit(p_, t_, power_of_two(x * kLog2e), lane, j);
    // Enlarged first: the slope of a soft cap may be so small that only a large key brings the
    // product back, and what is subnormal in between counts as zero.
    const VF dx = T == 1 ? at.dx : at.dx / kSmall;
    return {Terms<T>(at.p), Terms<T>(before_scale(p_, t_, dx, scale_, lane, j))};
  }

  // 32 rows of two keys at a time; keys that complete a tile of k are zero.
  void store_tile_rows(int64_t first) {
    const int64_t whole = tiles_of(t_.cols, kDepth) * kDepth;
    for (int lane = 0; lane < deep() * kDepth; lane += kDepth)
      for (int64_t j = 0; j < whole; j += 2) {
        const Operands low[2] = {element(j, lane), element(j, lane + kSide)};
        const Operands high[2] = {element(j + 1, lane), element(j + 1, lane + kSide)};
        const int64_t key = first + j;
        for (int t = 0; t < T; ++t) {
          store_row(t, key, lane, low), store_row(t, key + 1, lane, high);
          std::byte* const pairs = ds_pairs_ + t * kStepBytes + (key / 2 * kRows + lane) * 4;
          for (int half = 0; half < 2; ++half)
            _mm512_store_si512(pairs + half * kSide * 4, pairs_of(low[half].ds, high[half].ds, t));
        }
      }
  }

  TEA_INLINE void store_row(int t, int64_t key, int lane, const Operands (&at)[2]) {
    const int64_t to = t * kStepBytes + (key * kRows + lane) * 2;
    _mm512_store_si512(probs_ + to, joined(at[0].p.term[t], at[1].p.term[t]));
    _mm512_store_si512(ds_ + to, joined(at[0].ds.term[t], at[1].ds.term[t]));
  }

  const Problem& p_;
  const RowBlock& block_;
  Gradients<float>& g_;
  const float scale_;
  Tile<float> t_;
  const Packed<T> packed_;
  bool ordinary_;
  UnitScores<T> scores_;
  double dsink_[kRows];
  float *s_, *dp_;                         // [key][row] of the step
  std::byte *probs_, *ds_, *ds_pairs_;     // P and dS as A, dS as B
  Tiles q_, dout_, q_pairs_, dout_pairs_;  // as B, along their elements or rows
  int64_t first_ = 0, keys_ = 0;           // of the step
};
