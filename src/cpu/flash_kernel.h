// The tiled algorithm. The lanes of a vector correspond to the query rows of a block, so that
// scores are [key][row]: row maxima and sums need no shuffles, and keys and values are read without
// packing, one element at a time. Included once per instruction set, after simd.h and tile.h.
//
// Forward, for each tile of keys: S = K Q^T; scores; online softmax; O^T = O^T * rescale + V^T P.
// Backward: S and P again; dP = V dO^T; dS = P (dP - delta); dV += P dO; dK += dS Q; dQ^T += K^T
// dS.
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

// ------------------------------------------------------------------------------------- forward

// The largest logits so far; then P = exp(x - max), its sum, and what earlier parts shrink by.
template <class Real>
void softmax_lanes(Tile<Real>& t, int lane, Partial<Real> out, Real* shrink) {
  const V<Real> none = splat(-std::numeric_limits<Real>::infinity());
  const V<Real> before = load(out.max + lane);
  V<Real> max = before;
  for (int64_t j = 0; j < t.cols; ++j) max = larger(load(t.s + j * kRows + lane), max);
  const V<Real> base = max == none ? V<Real>{} : max;
  const V<Real> factor = exponential(before - base);
  V<Real> sum = load(out.sum + lane) * factor;
  for (int64_t j = 0; j < t.cols; ++j) {
    Real* at = t.s + j * kRows + lane;
    const V<Real> prob = exponential(load(at) - base);
    sum += prob;
    store(at, prob);
  }
  store(out.max + lane, max);
  store(out.sum + lane, sum);
  store(shrink + lane, factor);
}

template <class Real>
void softmax(Tile<Real>& t, Partial<Real> out, int64_t dim_v) {
  Real shrink[kRows];
  bool shrinks = false;
  for (int lane = 0; lane < t.lanes(); lane += kLanes<Real>) softmax_lanes(t, lane, out, shrink);
  for (int lane = 0; lane < t.lanes(); ++lane) shrinks |= shrink[lane] != 1;
  if (!shrinks) return;
  for (int64_t d = 0; d < dim_v; ++d)
    for (int lane = 0; lane < t.lanes(); lane += kLanes<Real>) {
      Real* at = out.o + d * kRows + lane;
      store(at, load(at) * load(shrink + lane));
    }
}

// FP8 casts exp(x - max) with the row's final maximum, which takes a pass of its own.
template <class Real>
void find_max(Tile<Real>& t, Columns columns, Real* max) {
  for (int64_t j0 = columns.begin; j0 < columns.end; j0 += kCols) {
    t.load_keys(j0, std::min<int64_t>(j0 + kCols, columns.end));
    t.scores(false);
    for (int64_t j = 0; j < t.cols; ++j)
      for (int lane = 0; lane < kRows; ++lane)
        max[lane] = std::fmax(max[lane], t.s[j * kRows + lane]);
  }
}

template <class Real>
void apply_dropout(Tile<Real>& t) {
  for (int64_t j = 0; j < t.cols; ++j)
    for (int lane = 0; lane < t.lanes(); lane += kLanes<Real>) {
      const int64_t at = j * kRows + lane;
      store(t.s + at, load(t.s + at) * load(t.keep + at));
    }
}

// How tiles get their scores, and where the tile with a column begins.
template <class Real>
struct VectorScores {
  int64_t first(int64_t column) const { return column; }
  void operator()(Tile<Real>& t, bool wants_cap_slope) const { t.scores(wants_cap_slope); }
};

template <class Real, class Scores>
double attend(const View& view, const RowBlock& block, Columns columns, Partial<Real> out,
              Real* scratch, const Scores& scores) {
  const Problem& p = view.p;
  const Subnormals none(false);
  Tile<Real> t(view, block, columns, scratch);
  for (int lane = 0; lane < kRows; ++lane)
    out.max[lane] = -std::numeric_limits<Real>::infinity(), out.sum[lane] = 0;
  for (int64_t i = 0; i < p.v_dim() * kRows; ++i) out.o[i] = 0;
  t.load_queries(TEA_Q, view.scalar(TEA_Q_SCALE_INV), p.dim_qk, t.dim_k(), t.q_rows);
  transpose(t.q_rows, t.dim_k(), kRows, t.dim_k(), t.q, kRows);
  if (p.is_fp8()) find_max(t, columns, out.max);
  double amax = 0;
  // Tiles of a batch-invariant problem begin at multiples of kCols, whichever keys are the first.
  const auto end_of = [&](int64_t begin) {
    const int64_t surplus = p.batch_invariant ? begin % kCols : 0;
    return std::min(begin - surplus + kCols, columns.end);
  };
  for (int64_t j0 = scores.first(columns.begin), end; j0 < columns.end; j0 = end) {
    end = end_of(j0);
    t.load_keys(j0, end);
    scores(t, false);
    softmax(t, out, p.v_dim());
    if (p.drops()) {
      t.dropout();
      apply_dropout(t);
    }
    if (p.is_fp8()) {
      amax = std::fmax(amax, largest(t.s, t.cols * kRows));
      cast_tile(t.s, t.cols * kRows, p.dtype, view.scalar(TEA_S_SCALE),
                view.scalar(TEA_S_SCALE_INV));
    }
    multiply<Real>(p.v_dim(), t.lanes(), t.cols, t.v.transposed(), t.s, kRows, out.o, kRows, true);
  }
  return amax;
}

template <class Real>
double attend(const View& view, const RowBlock& block, Columns columns, Partial<Real> out,
              Real* scratch) {
  return attend(view, block, columns, out, scratch, VectorScores<Real>{});
}

// Writes the statistics of one row; returns the factor of O.
template <class Real>
double finish_row(const View& view, const RowBlock& block, int lane, Partial<Real> all) {
  const Problem& p = view.p;
  const double none = -std::numeric_limits<double>::infinity();
  const RowAt at = block.at(lane);
  const auto sum = static_cast<double>(all.sum[lane]);
  auto max = static_cast<double>(all.max[lane]);
  // Maxima skip a NaN logit, but it is in the sum. (So is the NaN of infinite ones.)
  if (std::isnan(sum) && max < -none) max = sum;
  const bool nothing = max == none;
  const double keys = nothing ? none : max + std::log(sum), extra = view.sink(block.head[lane]);
  const double lse = log_add(keys, extra);
  if (p.writes_lse()) view.set_statistic(TEA_LSE, at, lse);
  if (p.outputs & TEA_OUTPUT_MAX) view.set_statistic(TEA_MAX, at, max);
  if (p.outputs & TEA_OUTPUT_SUM_EXP)
    view.set_statistic(TEA_SUM_EXP, at, nothing ? 0 : std::exp(lse - max));
  if (nothing) return 0;
  return extra == none ? 1 / sum : std::exp(max - lse);
}

template <class Real>
double finish(const View& view, const RowBlock& block, Partial<Real> all) {
  const int64_t dim = view.p.v_dim();
  const RowsOf of = view.rows(TEA_O);
  const auto o_scale = static_cast<Real>(view.scalar(TEA_O_SCALE));
  Real rows[kLanes<Real> * kMostDim];
  double amax = 0;
  for (int lane = 0; lane < block.count; ++lane) {
    const int n = lane % kLanes<Real>;
    if (n == 0) transpose(all.o + lane, kRows, padded(dim), kLanes<Real>, rows, kMostDim);
    Real* row = rows + n * kMostDim;
    const double norm = finish_row(view, block, lane, all);
    for (int64_t d = 0; d < dim; ++d)
      row[d] = norm == 0 ? Real{0} : row[d] * static_cast<Real>(norm);
    if (view.p.is_fp8()) amax = std::fmax(amax, largest(row, dim));
    if (o_scale != 1)
      for (int64_t d = 0; d < dim; ++d) row[d] *= o_scale;
    store_row(view.address(of, block.at(lane)), of.dtype, dim, row);
  }
  return amax;
}

// ------------------------------------------------------------------------------------ backward

// P with dropout, and the gradient of the logit.
template <class Real>
struct Pair {
  V<Real> p, dx;
};

// Of row `lane` and key j, where exp(logit - LSE) is `prob`.
template <class Real>
TEA_PRIMITIVE Pair<Real> gradient_of_logit(const Problem& p, const Tile<Real>& t, V<Real> prob,
                                           int lane, int64_t j) {
  const int64_t at = j * kRows + lane;
  const V<Real> keep = p.drops() ? load(t.keep + at) : splat(Real{1});
  const V<Real> dx = prob * (keep * load(t.dp + at) - load(t.delta + lane));
  return {t.where_visible(prob * keep, lane, j, 0), t.where_visible(dx, lane, j, 0)};
}

// The gradient of q.k + pre-scale bias. Masked elements are 0 even if the slope of the cap is NaN.
template <class Real>
TEA_PRIMITIVE V<Real> before_scale(const Problem& p, const Tile<Real>& t, V<Real> dx, Real scale,
                                   int lane, int64_t j) {
  if (!(p.softcap > 0)) return dx * scale;
  return t.where_visible(dx * load(t.cap_slope + j * kRows + lane) * scale, lane, j, 0);
}

template <class Real>
TEA_PRIMITIVE V<Real> probability(const Tile<Real>& t, int lane, int64_t at) {
  V<Real> x = load(t.s + at) - load(t.lse + lane);
  // Next to a large LSE its rounding may be more than the logits that it is the sum of.
  if constexpr (sizeof(Real) == 8) x = x > V<Real>{} ? V<Real>{} : x;
  return exponential(x);
}

template <class Real>
void load_dp(const Problem& p, Tile<Real>& t) {
  multiply<Real>(t.cols, t.lanes(), p.v_dim(), t.v, t.dout, kRows, t.dp, kRows, false);
  if (p.drops()) t.dropout();
}

// Adds the P . dP of a tile to dO . O. In fp64 dO . O is computed so: where one key has nearly the
// whole of P, dP - dO . O is small, and a product with the rounded O would leave nothing of it.
template <class Real>
void add_delta(const Problem& p, Tile<Real>& t) {
  load_dp(p, t);
  for (int64_t j = 0; j < t.cols; ++j)
    for (int lane = 0; lane < t.lanes(); lane += kLanes<Real>) {
      const int64_t at = j * kRows + lane;
      const V<Real> keep = p.drops() ? load(t.keep + at) : splat(Real{1});
      const V<Real> x = probability(t, lane, at) * keep * load(t.dp + at);
      store(t.delta + lane, load(t.delta + lane) + t.where_visible(x, lane, j, 0));
    }
}

// From scores and dP to P in t.s and the gradient of the logit in t.dp.
template <class Real>
void probabilities(const Problem& p, Tile<Real>& t) {
  for (int64_t j = 0; j < t.cols; ++j)
    for (int lane = 0; lane < t.lanes(); lane += kLanes<Real>) {
      const int64_t at = j * kRows + lane;
      const Pair<Real> both = gradient_of_logit(p, t, probability(t, lane, at), lane, j);
      store(t.s + at, both.p), store(t.dp + at, both.dx);
    }
}

template <class Real>
void before_scale(const Problem& p, Tile<Real>& t) {
  const auto scale = static_cast<Real>(p.scale_value());
  for (int64_t j = 0; j < t.cols; ++j)
    for (int lane = 0; lane < t.lanes(); lane += kLanes<Real>) {
      Real* at = t.dp + j * kRows + lane;
      store(at, before_scale(p, t, load(at), scale, lane, j));
    }
}

template <class Real>
void add_bias_gradient(const RowBlock& block, const Tile<Real>& t, Gradients<Real>& g) {
  for (int64_t j = 0; j < t.cols; ++j)
    for (int lane = 0; lane < block.count; ++lane)
      g.dbias[lane * g.dbias_row + (t.first + j) * g.dbias_col] += t.dp[j * kRows + lane];
}

// From the scores of a tile to its part of the gradients.
template <class Real>
void backward_tile(const View& view, const RowBlock& block, Tile<Real>& t, Gradients<Real>& g) {
  const Problem& p = view.p;
  load_dp(p, t);
  probabilities(p, t);
  const bool pre = p.bias == TEA_BIAS_PRE_SCALE;
  if (g.dbias && !pre) return add_bias_gradient(block, t, g);
  before_scale(p, t);
  if (g.dbias) return add_bias_gradient(block, t, g);
  const int64_t n = t.cols * kRows;
  if (p.is_fp8()) {
    g.dp_amax = std::fmax(g.dp_amax, largest(t.dp, n));
    cast_tile(t.s, n, p.dtype, view.scalar(TEA_S_SCALE), view.scalar(TEA_S_SCALE_INV));
    cast_tile(t.dp, n, is_fp8(p.dout_type()) ? p.dout_type() : +TEA_E5M2, view.scalar(TEA_DP_SCALE),
              view.scalar(TEA_DP_SCALE_INV));
  }
  const int64_t dk = t.dim_k(), dv = t.dim_v();
  multiply<Real>(t.cols, dv, t.lanes(), {t.s, kRows, 1}, t.dout_rows, dv, g.dv + t.first * dv, dv,
                 true);
  multiply<Real>(t.cols, dk, t.lanes(), {t.dp, kRows, 1}, t.q_rows, dk, g.dk + t.first * dk, dk,
                 true);
  multiply<Real>(p.dim_qk, t.lanes(), t.cols, t.k.transposed(), t.dp, kRows, t.dq, kRows, true);
}

template <class Real>
void store_dq(const View& view, const RowBlock& block, const Real* dq, Gradients<Real>& g) {
  const int64_t dim = view.p.dim_qk;
  const RowsOf of = view.rows(TEA_DQ);
  const auto scale = static_cast<Real>(view.scalar(TEA_DQ_SCALE));
  Real rows[kLanes<Real> * kMostDimOfTraining];
  for (int lane = 0; lane < block.count; ++lane) {
    const int n = lane % kLanes<Real>;
    if (n == 0) transpose(dq + lane, kRows, padded(dim), kLanes<Real>, rows, kMostDimOfTraining);
    Real* row = rows + n * kMostDimOfTraining;
    if (view.p.is_fp8()) g.dq_amax = std::fmax(g.dq_amax, largest(row, dim));
    if (scale != 1)
      for (int64_t d = 0; d < dim; ++d) row[d] *= scale;
    store_row(view.address(of, block.at(lane)), of.dtype, dim, row);
  }
}

// Writes dK or dV of one head; returns the largest magnitude before scaling.
template <class Real>
double store_keys(const View& view, tea_tensor t, tea_tensor scale_of, const Group& g, Real* rows) {
  const int64_t dim = t == TEA_DK ? view.p.dim_qk : view.p.v_dim();
  const RowsOf of = view.rows(t);
  const auto scale = static_cast<Real>(view.scalar(scale_of));
  double amax = 0;
  for (int64_t j = 0; j < g.kv.length; ++j) {
    Real* row = rows + j * padded(dim);
    if (view.p.is_fp8()) amax = std::fmax(amax, largest(row, dim));
    if (scale != 1)
      for (int64_t d = 0; d < dim; ++d) row[d] *= scale;
    store_row(view.address(of, {g.kv, g.b, g.kv_head, j}), of.dtype, dim, row);
  }
  return amax;
}

template <class Real, class Scores>
void backward(const View& view, const RowBlock& block, Gradients<Real>& g, Real* scratch,
              const Scores& scores) {
  const Problem& p = view.p;
  Tile<Real> t(view, block, block.all, scratch);
  t.load_queries(TEA_Q, view.scalar(TEA_Q_SCALE_INV), p.dim_qk, t.dim_k(), t.q_rows);
  t.load_queries(TEA_DOUT, view.scalar(TEA_DOUT_SCALE_INV), p.v_dim(), t.dim_v(), t.dout_rows);
  transpose(t.q_rows, t.dim_k(), kRows, t.dim_k(), t.q, kRows);
  transpose(t.dout_rows, t.dim_v(), kRows, t.dim_v(), t.dout, kRows);
  const auto for_each_tile = [&](auto&& body) {
    for (int64_t j0 = scores.first(block.all.begin); j0 < block.all.end; j0 += kCols) {
      t.load_keys(j0, std::min<int64_t>(j0 + kCols, block.all.end));
      scores(t, p.softcap > 0);
      body();
    }
  };
  if (sizeof(Real) == 8 && !view.run.partial) {
    load_lse(view, block, t);
    std::fill_n(t.delta, kRows, Real{0});
    for_each_tile([&] { add_delta(p, t); });
    finish_delta(view, block, t, g.dsink);
  } else {
    row_sums(view, block, t, g.dsink);
  }
  for (int64_t i = 0; i < t.dim_k() * kRows; ++i) t.dq[i] = 0;
  for_each_tile([&] { backward_tile(view, block, t, g); });
  if (!g.dbias) store_dq(view, block, t.dq, g);
}

template <class Real>
void backward(const View& view, const RowBlock& block, Gradients<Real>& g, Real* scratch) {
  backward(view, block, g, scratch, VectorScores<Real>{});
}

template <class Real>
constexpr Kernels<Real> kKernels{scratch_reals<Real>, nullptr,        nullptr,         attend<Real>,
                                 finish<Real>,        backward<Real>, store_keys<Real>};
