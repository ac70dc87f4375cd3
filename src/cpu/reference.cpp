// The definition. For each row: scores of the visible columns, softmax, dropout, the sum of values,
// and the gradients of these. Every rule of docs/semantics.md is implemented here once, in the
// order of its application.
#include "cpu/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/view.h"
#include "math/bias.h"
#include "math/load_store.h"
#include "math/softmax.h"

namespace tea::cpu {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

std::span<double> row_of(Reals& rows, int64_t j, int64_t dim) {
  return {rows.data() + j * dim, static_cast<size_t>(dim)};
}
std::span<const double> row_of(const Reals& rows, int64_t j, int64_t dim) {
  return {rows.data() + j * dim, static_cast<size_t>(dim)};
}

double dot(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

void add(std::span<double> to, double factor, std::span<const double> from) {
  for (size_t i = 0; i < to.size(); ++i) to[i] += factor * from[i];
}

double largest(std::span<const double> values) {
  double high = 0;
  for (const double x : values) high = std::fmax(high, std::fabs(x));
  return high;
}

// In types that are not fp8, P and dS stay as they are.
double cast(double x, int32_t dtype) { return is_fp8(dtype) ? cast_to_fp8(x, dtype) : x; }

// One sequence with its keys and values of one kv head. Keys past the length, in gaps and in unused
// pages are never loaded, so that nothing in them can reach a result.
struct Item {
  int64_t b, kv_head;
  Sequence q, kv;
  Origin origin;
  int64_t delta;
  Band band;
  Reals k, v;  // [length][dim]
};

Item load_item(const View& view, int64_t b, int64_t kv_head) {
  const Problem& p = view.p;
  Item item{b, kv_head, view.queries(b), view.keys(b), view.origin(b), 0, {}, {}, {}};
  item.delta = diagonal(p.bottom_right, item.q.length, item.kv.length) + item.origin.shift;
  item.band = band(p.mask(), item.delta, item.origin.row, item.origin.column);
  item.k.resize(static_cast<size_t>(item.kv.length * p.dim_qk));
  item.v.resize(static_cast<size_t>(item.kv.length * p.v_dim()));
  const RowsOf k = view.rows(TEA_K), v = view.rows(TEA_V);
  const double k_scale = view.kv_scale(TEA_K_SCALE_INV, kv_head);
  const double v_scale = view.kv_scale(TEA_V_SCALE_INV, kv_head);
  for (int64_t j = 0; j < item.kv.length; ++j) {
    view.load(k, {item.kv, b, kv_head, j}, k_scale, row_of(item.k, j, p.dim_qk));
    view.load(v, {item.kv, b, kv_head, j}, v_scale, row_of(item.v, j, p.v_dim()));
  }
  return item;
}

template <class Body>
void for_each_item(const View& view, Body&& body) {
  for (int64_t b = 0; b < view.batch(); ++b)
    for (int64_t g = 0; g < view.p.heads_kv; ++g) body(load_item(view, b, g));
}

// Scores and probabilities of one (sequence, query head) pair.
class Head {
 public:
  Head(const View& view, const Item& item, int64_t head)
      : h(head), view_(view), p_(view.p), item_(item), slope_(view.slope(item.b, head)) {}

  const int64_t h;

  Columns columns(int64_t i) const { return visible_columns(item_.band, i, item_.kv.length); }
  RowAt query(int64_t i) const { return {item_.q, item_.b, h, i}; }

  struct Score {
    double value;      // the logit: the input of the softmax
    double cap_slope;  // d value / d (scale * (q.k + pre-scale bias)): the slope of the soft cap
  };

  Score score(std::span<const double> q, int64_t i, int64_t j) const {
    double x = dot(q, row_of(item_.k, j, p_.dim_qk)), cap_slope = 1;
    if (p_.bias == TEA_BIAS_PRE_SCALE) x += bias(i, j);
    x *= p_.scale_value();
    if (p_.softcap > 0) {
      x = softcap(x, p_.softcap);
      cap_slope = softcap_slope(x, p_.softcap);
    }
    if (p_.bias == TEA_BIAS_POST_SCALE) x += bias(i, j);
    if (p_.alibi)
      x -= slope_ * static_cast<double>(
                        alibi_distance(i + item_.origin.row, item_.delta, j + item_.origin.column));
    return {x, cap_slope};
  }

  double sink() const { return view_.sink(h); }

  // The dropout factor of a probability: 0 or 1 / (1 - p); 1 without dropout.
  double keep(int64_t i, int64_t j) const {
    if (!p_.drops()) return 1;
    const uint32_t stream = dropout_stream(item_.b + item_.origin.batch, h + item_.origin.head);
    const uint32_t threshold = dropout_threshold(static_cast<float>(p_.dropout));
    const bool kept =
        dropout_keeps(view_.rng, stream, i + item_.origin.row, j + item_.origin.column, threshold);
    return kept ? 1 / (1 - p_.dropout) : 0;
  }

 private:
  double bias(int64_t i, int64_t j) const {
    const tea_bias_strides& s = view_.size.bias;
    return load_real(view_.run.tensor[TEA_BIAS], p_.bias_type(),
                     item_.b * s.batch + h * s.head + i * s.row + j * s.col);
  }

  const View& view_;
  const Problem& p_;
  const Item& item_;
  double slope_;
};

// Every row of the query heads that share the item's keys and values.
template <class Body>
void for_each_row(const View& view, const Item& item, Body&& body) {
  const int64_t group = view.p.heads_q / view.p.heads_kv;
  for (int64_t n = 0; n < group; ++n) {
    const Head head(view, item, item.kv_head * group + n);
    for (int64_t i = 0; i < item.q.length; ++i) body(head, i);
  }
}

// ------------------------------------------------------------------------------------- forward

class Forward {
 public:
  explicit Forward(const View& view)
      : view_(view),
        p_(view.p),
        q_(static_cast<size_t>(p_.dim_qk)),
        o_(static_cast<size_t>(p_.v_dim())) {}

  void operator()() {
    view_.fill(TEA_O, 0);
    if (p_.writes_lse()) view_.fill(TEA_LSE, -kInfinity);
    if (p_.outputs & TEA_OUTPUT_MAX) view_.fill(TEA_MAX, -kInfinity);
    if (p_.outputs & TEA_OUTPUT_SUM_EXP) view_.fill(TEA_SUM_EXP, 0);
    for_each_item(view_, [&](const Item& item) {
      for_each_row(view_, item, [&](const Head& head, int64_t i) { row(item, head, i); });
    });
    view_.raise(TEA_S_AMAX, s_amax_);
    view_.raise(TEA_O_AMAX, o_amax_);
  }

 private:
  void row(const Item& item, const Head& head, int64_t i) {
    const RowAt at = head.query(i);
    view_.load(view_.rows(TEA_Q), at, view_.scalar(TEA_Q_SCALE_INV), q_);
    const Columns c = head.columns(i);
    const double max = scores(head, i, c);
    const bool nothing = max == -kInfinity;
    double sum = 0;
    for (double& x : x_) sum += x = nothing ? 0 : std::exp(x - max);
    const double lse = log_add(nothing ? -kInfinity : max + std::log(sum), head.sink());

    std::ranges::fill(o_, 0.0);
    // With a bias of -1e30 the logarithm of the sum is below the precision of LSE.
    const double norm = head.sink() == -kInfinity ? 1 / sum : std::exp(max - lse);
    if (!nothing) values(item, head, i, c, norm);
    o_amax_ = std::fmax(o_amax_, largest(o_));
    view_.store(view_.rows(TEA_O), at, view_.scalar(TEA_O_SCALE), o_);
    if (p_.writes_lse()) view_.set_statistic(TEA_LSE, at, lse);
    if (p_.outputs & TEA_OUTPUT_MAX) view_.set_statistic(TEA_MAX, at, max);
    if (p_.outputs & TEA_OUTPUT_SUM_EXP)
      view_.set_statistic(TEA_SUM_EXP, at, nothing ? 0 : std::exp(lse - max));
  }

  // Fills x_ and returns the largest; NaN if one of them is, -infinity if there is none.
  double scores(const Head& head, int64_t i, const Columns& c) {
    x_.clear();
    double max = -kInfinity;
    for (int64_t j = c.begin; j < c.end; ++j) {
      const double x = head.score(q_, i, j).value;
      x_.push_back(x);
      if (x > max || std::isnan(x)) max = x;
    }
    return max;
  }

  // o = norm * sum of keep * exp(x - max) * V. In fp8, keep * exp(x - max) is cast with its scale.
  void values(const Item& item, const Head& head, int64_t i, const Columns& c, double norm) {
    const double scale = view_.scalar(TEA_S_SCALE), scale_inv = view_.scalar(TEA_S_SCALE_INV);
    for (int64_t j = c.begin; j < c.end; ++j) {
      const double e = head.keep(i, j) * x_[static_cast<size_t>(j - c.begin)];
      s_amax_ = std::fmax(s_amax_, e);
      add(o_, cast(e * scale, p_.dtype) * scale_inv, row_of(item.v, j, p_.v_dim()));
    }
    for (double& o : o_) o *= norm;
  }

  const View& view_;
  const Problem& p_;
  Reals q_, o_, x_;
  double s_amax_ = 0, o_amax_ = 0;
};

// ------------------------------------------------------------------------------------ backward

class Backward {
 public:
  explicit Backward(const View& view)
      : view_(view),
        p_(view.p),
        ds_type_(!p_.is_fp8() || is_fp8(p_.dout_type()) ? p_.dout_type() : +TEA_E5M2),
        dbias_shape_(tensor_info(TEA_DBIAS).shape(p_, view.size)),
        q_(static_cast<size_t>(p_.dim_qk)),
        dq_(static_cast<size_t>(p_.dim_qk)),
        o_(static_cast<size_t>(p_.v_dim())),
        dout_(static_cast<size_t>(p_.v_dim())),
        dsink_(static_cast<size_t>(p_.heads_q)) {
    if (view.run.tensor[TEA_DBIAS]) dbias_.resize(static_cast<size_t>(dbias_shape_.elements()));
  }

  void operator()() {
    for (const tea_tensor t : {TEA_DQ, TEA_DK, TEA_DV}) view_.fill(t, 0);
    for_each_item(view_, [&](const Item& item) { keys(item); });
    view_.raise(TEA_DP_AMAX, dp_amax_);
    for (size_t i = 0; i < dbias_.size(); ++i)
      store_real(view_.run.tensor[TEA_DBIAS], p_.bias_type(),
                 dbias_shape_.offset(static_cast<int64_t>(i)), dbias_[i]);
    view_.set_sink_gradient(dsink_);
  }

 private:
  void keys(const Item& item) {
    dk_.assign(item.k.size(), 0), dv_.assign(item.v.size(), 0);
    for_each_row(view_, item, [&](const Head& head, int64_t i) { row(item, head, i); });
    store_keys(TEA_DK, TEA_DK_SCALE, TEA_DK_AMAX, item, dk_);
    store_keys(TEA_DV, TEA_DV_SCALE, TEA_DV_AMAX, item, dv_);
  }

  void row(const Item& item, const Head& head, int64_t i) {
    const RowAt at = head.query(i);
    const double lse = view_.statistic(TEA_LSE, at);
    if (lse == -kInfinity) return;  // nothing attended: no gradient, and dQ is already zero
    view_.load(view_.rows(TEA_Q), at, view_.scalar(TEA_Q_SCALE_INV), q_);
    view_.load(view_.rows(TEA_DOUT), at, view_.scalar(TEA_DOUT_SCALE_INV), dout_);
    const Columns c = head.columns(i);
    double delta = delta_of(item, head, at, c, lse);
    if (p_.lse_gradient) delta -= view_.statistic(TEA_DLSE, at);
    if (view_.run.tensor[TEA_DSINK])
      dsink_[static_cast<size_t>(head.h)] -= std::exp(head.sink() - lse) * delta;

    std::ranges::fill(dq_, 0.0);
    for (int64_t j = c.begin; j < c.end; ++j) pair(item, head, i, j, {lse, delta});
    view_.raise(TEA_DQ_AMAX, largest(dq_));
    view_.store(view_.rows(TEA_DQ), at, view_.scalar(TEA_DQ_SCALE), dq_);
  }

  struct RowSums {
    double lse, delta;
  };

  // dO . O. In fp64 as the sum of P . dP: where one key has nearly the whole of P, dP - dO . O is
  // small, and a product with the rounded O would leave nothing of it.
  double delta_of(const Item& item, const Head& head, const RowAt& at, Columns c, double lse) {
    if (p_.dtype != TEA_FP64 || view_.run.partial) {
      view_.load(view_.rows(TEA_O), at, view_.scalar(TEA_O_SCALE_INV), o_);
      return dot(dout_, o_);
    }
    double sum = 0;
    for (int64_t j = c.begin; j < c.end; ++j)
      sum += probability(head.score(q_, at.i, j).value, lse) * head.keep(at.i, j) *
             dot(dout_, row_of(item.v, j, p_.v_dim()));
    return sum;
  }

  // Never above 1, whatever the rounding of LSE has made of a large one.
  static double probability(double x, double lse) { return std::exp(std::min(x - lse, 0.0)); }

  // One probability: its part in dV, dBias, dQ and dK.
  void pair(const Item& item, const Head& head, int64_t i, int64_t j, RowSums sums) {
    const auto [x, cap_slope] = head.score(q_, i, j);
    const double prob = probability(x, sums.lse), keep = head.keep(i, j);
    const double s8 = cast(prob * keep * view_.scalar(TEA_S_SCALE), p_.dtype);
    add(row_of(dv_, j, p_.v_dim()), s8 * view_.scalar(TEA_S_SCALE_INV), dout_);

    const double dprob = keep * dot(dout_, row_of(item.v, j, p_.v_dim()));
    const double dx = prob * (dprob - sums.delta);
    const double dqk = dx * cap_slope * p_.scale_value();  // the gradient of q.k + pre-scale bias
    if (!dbias_.empty()) dbias_at(item.b, head.h, i, j) += p_.bias == TEA_BIAS_PRE_SCALE ? dqk : dx;
    dp_amax_ = std::fmax(dp_amax_, std::fabs(dqk));
    const double ds8 = cast(dqk * view_.scalar(TEA_DP_SCALE), ds_type_);
    add(dq_, ds8 * view_.scalar(TEA_DP_SCALE_INV), row_of(item.k, j, p_.dim_qk));
    add(row_of(dk_, j, p_.dim_qk), ds8 * view_.scalar(TEA_DP_SCALE_INV), q_);
  }

  void store_keys(tea_tensor t, tea_tensor scale, tea_tensor amax, const Item& item, Reals& rows) {
    const int64_t dim = t == TEA_DK ? p_.dim_qk : p_.v_dim();
    view_.raise(amax, largest(rows));
    const RowsOf to = view_.rows(t);
    for (int64_t j = 0; j < item.kv.length; ++j)
      view_.store(to, {item.kv, item.b, item.kv_head, j}, view_.scalar(scale),
                  row_of(rows, j, dim));
  }

  // The dimensions that a broadcast bias lacks have size 1: its gradient is summed over them.
  double& dbias_at(int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t index[4] = {b, h, i, j};
    int64_t flat = 0;
    for (int d = 0; d < 4; ++d)
      flat = flat * dbias_shape_.size[d] + (dbias_shape_.size[d] == 1 ? 0 : index[d]);
    return dbias_[static_cast<size_t>(flat)];
  }

  const View& view_;
  const Problem& p_;
  const int32_t ds_type_;
  const Shape dbias_shape_;
  Reals q_, dq_, o_, dout_, dk_, dv_, dbias_, dsink_;
  double dp_amax_ = 0;
};

struct Reference : Executable {
  Problem problem;
  explicit Reference(const Problem& p) : problem(p) {}

  void forward(const Run& run) const override {
    const View view(problem, run);
    Forward{view}();
  }
  void backward(const Run& run) const override {
    const View view(problem, run);
    Backward{view}();
  }
};

constexpr Known kKnown[] = {
    {"dtype", below(7)},
    {"o_dtype", below(7)},
    {"dout_dtype", below(7)},
    {"dqkv_dtype", below(7)},
    {"bias_dtype", below(7)},
    {"training", below(2)},
    {"deterministic", below(2)},
    {"outputs", below(3)},
    {"lse_gradient", below(2)},
    {"q_form", below(3)},
    {"kv_form", below(4)},
    {"gaps", below(2)},
    {"causal", below(2)},
    {"bottom_right", below(2)},
    {"window_left"},
    {"window_right"},
    {"bias", below(3)},
    {"bias_broadcast", below(4)},
    {"alibi", below(3)},
    {"softmax", below(3)},
    {"softcap"},
    {"dropout"},
    {"scale"},
    {"has_scale", below(2)},
    {"kv_dtype", below(7)},
    {"kv_scale", below(2)},
    {"batch_invariant", below(2)},
    {"max_ctas"},
};

}  // namespace

std::span<const Known> known_fields() { return kKnown; }

Attempt plan_reference(const Problem& problem, const Device& device) {
  TEA_REFUSE_IF(!device.is_host(), "device is a GPU; it runs on the host");
  return std::make_unique<Reference>(problem);
}

}  // namespace tea::cpu
