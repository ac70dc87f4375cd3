// The values of each row that backward needs before its loop over the keys: LSE, delta = dO . O -
// dLSE, and the gradient of the sinks. Included once per instruction set, between tile.h and
// flash_tile.h.
#pragma once

template <class Real>
class Tile;

// a . b in double, in sums of their own for every lane: one sum would wait for each addition. n is
// a multiple of kPad.
template <class Real>
double dot(const Real* a, const Real* b, int64_t n) {
  double sum[kPad] = {}, all = 0;
  for (int64_t i = 0; i < n; i += kPad)
    for (int lane = 0; lane < kPad; ++lane)
      sum[lane] += static_cast<double>(a[i + lane]) * static_cast<double>(b[i + lane]);
  for (const double one : sum) all += one;
  return all;
}

// LSE by lane; lanes that attend to nothing keep +infinity, so that their P is 0.
template <class Real>
void load_lse(const View& view, const RowBlock& block, Tile<Real>& t) {
  for (int lane = 0; lane < kRows; ++lane) {
    t.lse[lane] = std::numeric_limits<Real>::infinity();
    if (lane >= block.count) continue;
    const double lse = view.statistic(TEA_LSE, block.at(lane));
    if (lse != -std::numeric_limits<double>::infinity()) t.lse[lane] = static_cast<Real>(lse);
  }
}

// delta = dO . O by lane.
template <class Real>
void load_delta(const View& view, const RowBlock& block, Tile<Real>& t) {
  const int64_t stride = t.dim_v();
  t.load_queries(TEA_O, view.scalar(TEA_O_SCALE_INV), view.p.v_dim(), stride, t.o);
  for (int lane = 0; lane < kRows; ++lane)
    t.delta[lane] =
        block.sees(lane)
            ? static_cast<Real>(dot(t.dout_rows + lane * stride, t.o + lane * stride, stride))
            : 0;
}

// From dO . O to delta = dO . O - dLSE, and the part of the sinks' gradient.
template <class Real>
void finish_delta(const View& view, const RowBlock& block, Tile<Real>& t, double* dsink) {
  for (int lane = 0; lane < kRows; ++lane) {
    auto delta = static_cast<double>(t.delta[lane]);
    t.delta[lane] = 0;
    if (lane >= block.count) continue;
    const RowAt at = block.at(lane);
    const double lse = view.statistic(TEA_LSE, at);
    if (lse == -std::numeric_limits<double>::infinity()) continue;
    if (view.p.lse_gradient) delta -= view.statistic(TEA_DLSE, at);
    t.delta[lane] = static_cast<Real>(delta);
    if (view.run.tensor[TEA_DSINK])
      dsink[lane] -= std::exp(view.sink(block.head[lane]) - lse) * delta;
  }
}

template <class Real>
void row_sums(const View& view, const RowBlock& block, Tile<Real>& t, double* dsink) {
  load_lse(view, block, t);
  load_delta(view, block, t);
  finish_delta(view, block, t, dsink);
}
