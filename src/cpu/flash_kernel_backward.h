// The backward pass of the tiled algorithm, of which flash_kernel.h is the forward pass. Included
// once per instruction set, after flash_kernel.h.
#pragma once

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
