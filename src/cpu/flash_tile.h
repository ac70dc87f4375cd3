// One tile of the tiled algorithm of flash_kernel.h: its operands, scores and visibility. Included
// once per instruction set, after row_sums.h.
#pragma once

// One block and one tile of its keys, with the memory they need.
template <class Real>
class Tile {
 public:
  static constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

  // Of the keys in `limit` only.
  Tile(const View& view, const RowBlock& block, Columns limit, Real* scratch)
      : view_(view),
        p_(view.p),
        block_(block),
        limit_(limit),
        dk_(padded(p_.dim_qk)),
        dv_(padded(p_.v_dim())) {
    const auto take = [&](int64_t n) {
      Real* at = scratch;
      scratch += n;
      return at;
    };
    q = take(dk_ * kRows), q_rows = take(dk_ * kRows), dq = take(dk_ * kRows);
    dout = take(dv_ * kRows), dout_rows = take(dv_ * kRows), o = take(dv_ * kRows);
    k_copy_ = take(dk_ * kCols), v_copy_ = take(dv_ * kCols);
    constexpr int64_t tile = int64_t{kCols} * kRows;
    s = take(tile), dp = take(tile), cap_slope = take(tile), bias_ = take(tile), keep = take(tile);
    lse = take(kRows), delta = take(kRows);
    slope_ = take(kRows), begin_ = take(kRows), end_ = take(kRows);
    prepare_lanes();
  }

  Real *q, *q_rows, *dq;       // Q^T [dim][row], Q [row][dim], dQ^T
  Real *dout, *dout_rows, *o;  // dO^T, dO, O^T
  Operand<Real> k{}, v{};      // [key][dim]
  Real *s, *dp, *cap_slope,
      *keep;          // [key][row]: scores then P; dP then dS; slope of the cap; dropout
  Real *lse, *delta;  // [row]
  int64_t first = 0;  // column of the tile's first key
  int64_t cols = 0;

  // Rows that are worked on: the block's, in whole vectors. FP8 looks at its tiles as a whole.
  int lanes() const {
    if (p_.is_fp8()) return kRows;
    return (block_.count + kLanes<Real> - 1) / kLanes<Real> * kLanes<Real>;
  }
  int64_t dim_k() const { return dk_; }
  int64_t dim_v() const { return dv_; }

  // Loads rows of a tensor into rows[lane][stride]; lanes without a visible key are zero.
  void load_queries(tea_tensor t, double scale, int64_t dim, int64_t stride, Real* rows) const {
    const Subnormals kept(true);
    const RowsOf of = view_.rows(t);
    for (int lane = 0; lane < kRows; ++lane) {
      Real* to = rows + lane * stride;
      for (int64_t i = 0; i < stride; ++i) to[i] = 0;
      if (block_.sees(lane)) load_row(view_.address(of, block_.at(lane)), of.dtype, dim, scale, to);
    }
  }

  // Moves to the keys [begin, end) and sets the rows' visible ranges among them.
  void move(int64_t begin, int64_t end) {
    first = begin, cols = end - begin;
    partial_ = !whole({begin, end});
    for (int lane = 0; partial_ && lane < kRows; ++lane) {
      const Columns& all = block_.columns[lane];
      begin_[lane] = static_cast<Real>(within(std::max(all.begin, limit_.begin)));
      end_[lane] = static_cast<Real>(within(std::min(all.end, limit_.end)));
    }
  }

  // Whether each lane has a row to which all of these keys are visible.
  bool whole(Columns keys) const {
    const Columns& all = block_.common;
    return block_.count == kRows && keys.begin >= std::max(all.begin, limit_.begin) &&
           keys.end <= std::min(all.end, limit_.end);
  }

  void load_keys(int64_t begin, int64_t end) {
    move(begin, end);
    k = load_side(TEA_K, p_.dim_qk, dk_, k_copy_);
    v = load_side(TEA_V, p_.v_dim(), dv_, v_copy_);
  }

  // S = K Q^T, then the logits.
  void scores(bool wants_cap_slope) {
    multiply<Real>(cols, lanes(), p_.dim_qk, k, q, kRows, s, kRows, false);
    logits(wants_cap_slope);
  }

  // Score modifications and masking, between the product and the softmax. Masked scores are
  // -infinity. `wants_cap_slope`: also the slope of the soft cap.
  void logits(bool wants_cap_slope) {
    const Subnormals kept(true);
    if (p_.bias) load_bias();
    for (int lane = 0; lane < lanes(); lane += kLanes<Real>)
      is_plain() ? plain_scores(lane) : general_scores(lane, wants_cap_slope);
  }

  // Whether logits are scores times the scale.
  bool is_plain() const { return !p_.bias && !p_.alibi && !(p_.softcap > 0); }

  // x if key j of the tile is visible to the row, else `hidden`.
  V<Real> where_visible(V<Real> x, int lane, int64_t j, Real hidden) const {
    if (!partial_) return x;
    const V<Real> column = splat(static_cast<Real>(j));
    const auto seen = (load(begin_ + lane) <= column) & (column < load(end_ + lane));
    return seen ? x : splat(hidden);
  }

  // 0 or 1 / (1 - p) for every element of the tile.
  void dropout() {
    const uint32_t threshold = dropout_threshold(static_cast<float>(p_.dropout));
    const int64_t from = first + block_.group.origin.column, to = from + cols;
    for (int64_t cell = from / 16 * 4; cell * 4 < to + 12; ++cell) {
      const int64_t left = cell / 4 * 16 + cell % 4 * 2;
      if (left + 9 < from || left >= to) continue;
      for (int lane = 0; lane < lanes(); lane += kLanes<uint32_t>)
        dropout_cells(lane, cell, left - from, threshold);
    }
  }

 private:
  // Relative to the tile, clamped so that it stays exact in Real.
  int64_t within(int64_t column) const {
    return std::clamp<int64_t>(column - first, -1, kCols + 1);
  }

  void prepare_lanes() {
    const Origin& origin = block_.group.origin;
    const int64_t delta_row = block_.group.delta + origin.row;
    for (int lane = 0; lane < kRows; ++lane) {
      const int64_t h = block_.head[lane];
      row_[lane] = block_.row[lane] + origin.row;
      aligned_[lane] = block_.row[lane] + delta_row - origin.column;
      stream_[lane] =
          p_.drops() ? dropout_stream(block_.group.b + origin.batch, h + origin.head) : 0;
      slope_[lane] = p_.alibi ? static_cast<Real>(view_.slope(block_.group.b, h)) : Real{0};
    }
  }

  // Keys or values of the tile: where they lie if they are Reals at a constant distance, else in
  // `copy`. Subnormal ones too: dropout may multiply their P by much.
  Operand<Real> load_side(tea_tensor t, int64_t dim, int64_t stride, Real* copy) const {
    const RowsOf of = view_.rows(t);
    const Group& g = block_.group;
    const auto row = [&](int64_t j) {
      return view_.address(of, {g.kv, g.b, g.kv_head, first + j});
    };
    constexpr int32_t kOwn = std::is_same_v<Real, float> ? +TEA_FP32 : +TEA_FP64;
    if (of.dtype == kOwn && of.form != TEA_PAGED)
      return {static_cast<const Real*>(row(0)), of.stride.seq, 1};
    const double scale = view_.kv_scale(t == TEA_K ? TEA_K_SCALE_INV : TEA_V_SCALE_INV, g.kv_head);
    const Subnormals kept(true);
    for (int64_t j = 0; j < cols; ++j) load_row(row(j), of.dtype, dim, scale, copy + j * stride);
    return {copy, stride, 1};
  }

  void load_bias() {
    const tea_bias_strides& st = view_.size.bias;
    const int32_t dtype = p_.bias_type();
    const auto at = [&](int lane) {
      return block_.group.b * st.batch + block_.head[lane] * st.head + block_.row[lane] * st.row +
             first * st.col;
    };
    if (st.col == 1 && (dtype == TEA_FP32 || dtype == TEA_BF16)) {
      Real rows[kRows * kCols]{};
      const auto* data = static_cast<const char*>(view_.run.tensor[TEA_BIAS]);
      for (int lane = 0; lane < kRows; ++lane)
        if (block_.sees(lane))
          load_row(data + at(lane) * dtype_bytes(dtype), dtype, cols, 1, rows + lane * kCols);
      return transpose(rows, kCols, kRows, kCols, bias_, kRows);
    }
    for (int lane = 0; lane < kRows; ++lane)
      for (int64_t j = 0; block_.sees(lane) && j < cols; ++j)
        bias_[j * kRows + lane] =
            static_cast<Real>(load_real(view_.run.tensor[TEA_BIAS], dtype, at(lane) + j * st.col));
  }

  void plain_scores(int lane) {
    const auto scale = static_cast<Real>(p_.scale_value());
    for (int64_t j = 0; j < cols; ++j) {
      Real* at = s + j * kRows + lane;
      store(at, where_visible(load(at) * scale, lane, j, -kInfinity));
    }
  }

  void general_scores(int lane, bool wants_cap_slope) {
    const auto scale = static_cast<Real>(p_.scale_value()), cap = static_cast<Real>(p_.softcap);
    V<Real> position;
    for (int i = 0; i < kLanes<Real>; ++i)
      position[i] = static_cast<Real>(aligned_[lane + i] - first);
    const V<Real> slopes = load(slope_ + lane);
    for (int64_t j = 0; j < cols; ++j) {
      const int64_t at = j * kRows + lane;
      V<Real> x = load(s + at);
      if (p_.bias == TEA_BIAS_PRE_SCALE) x += load(bias_ + at);
      x *= scale;
      V<Real> slope_of_cap = splat(Real{1});
      if (cap > 0) {
        const V<Real> t = hyperbolic_tangent(x / cap);
        x = t * cap;
        slope_of_cap = Real{1} - t * t;
      }
      if (wants_cap_slope) store(cap_slope + at, slope_of_cap);
      if (p_.bias == TEA_BIAS_POST_SCALE) x += load(bias_ + at);
      if (p_.alibi) {
        const V<Real> distance = position - static_cast<Real>(j);
        x -= slopes * (distance < 0 ? -distance : distance);
      }
      store(s + at, where_visible(x, lane, j, -kInfinity));
    }
  }

  // One column of cells for kLanes rows: four of a cell's uniforms are this row's.
  void dropout_cells(int lane, int64_t cell, int64_t left, uint32_t threshold) {
    constexpr int n = kLanes<uint32_t>;
    VU counter[4], upper;
    for (int i = 0; i < n; ++i) {
      const int64_t row = row_[lane + i];
      counter[0][i] = static_cast<uint32_t>((row >> 4) * 8 + (row & 7));
      counter[2][i] = stream_[lane + i];
      upper[i] = row >> 3 & 1 ? ~0u : 0u;
    }
    counter[1] = VU{} + static_cast<uint32_t>(cell);
    counter[3] = VU{} + static_cast<uint32_t>(view_.rng.offset);
    philox(counter, view_.rng.seed ^ (view_.rng.offset >> 32 << 32));
    const VU near = (counter[2] & upper) | (counter[0] & ~upper);
    const VU far = (counter[3] & upper) | (counter[1] & ~upper);
    keep_column(lane, left, near & 0xFFFFu, threshold);
    keep_column(lane, left + 1, near >> 16, threshold);
    keep_column(lane, left + 8, far & 0xFFFFu, threshold);
    keep_column(lane, left + 9, far >> 16, threshold);
  }

  static void philox(VU (&c)[4], uint64_t key) {
    auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
      VU low0, high0, low1, high1;
      multiply_wide(c[0], 0xD2511F53u, low0, high0);
      multiply_wide(c[2], 0xCD9E8D57u, low1, high1);
      c[0] = high1 ^ c[1] ^ k0, c[1] = low1;
      c[2] = high0 ^ c[3] ^ k1, c[3] = low0;
      k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
  }

  void keep_column(int lane, int64_t j, VU uniform, uint32_t threshold) {
    if (j < 0 || j >= cols) return;
    const auto kept = static_cast<Real>(1 / (1 - p_.dropout));
    Real* to = keep + j * kRows + lane;
    for (int i = 0; i < kLanes<uint32_t>; ++i) to[i] = uniform[i] >= threshold ? kept : Real{0};
  }

  const View& view_;
  const Problem& p_;
  const RowBlock& block_;
  const Columns limit_;
  const int64_t dk_, dv_;
  Real *k_copy_, *v_copy_, *bias_, *slope_, *begin_, *end_;
  int64_t row_[kRows], aligned_[kRows];
  uint32_t stream_[kRows];
  bool partial_ = false;
};
