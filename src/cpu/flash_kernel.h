// The tiled algorithm. The lanes of a vector correspond to the query rows of a block, so that
// scores are [key][row]: row maxima and sums need no shuffles, and keys and values are read without
// packing, one element at a time. Included once per instruction set, after flash_tile.h.
//
// Forward, for each tile of keys: S = K Q^T; scores; online softmax; O^T = O^T * rescale + V^T P.
// Backward: S and P again; dP = V dO^T; dS = P (dP - delta); dV += P dO; dK += dS Q; dQ^T += K^T
// dS.
#pragma once

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
