// The gradients of single rows and keys in double precision, from O and LSE as the forward pass has
// stored them, with bounds of the rounding error.
#pragma once
#include "hopper/backward/backward_case.h"

namespace tea::primitives {

struct Bounded {
  double value = 0, error = 0;
  double size = 0;  // of a sum: the sum of magnitudes
};
using BoundedVector = std::vector<Bounded>;

class Exact {
 public:
  Exact(const BackwardCase& c, const BackwardData& x) : c_(c), x_(x) {}

  // dQ of a row.
  BoundedVector dq(int b, int h, int row) const {
    BoundedVector sum(c_.dim);
    const Columns keys = visible_columns(c_.band(), row, c_.n.rows_kv);
    if (keys.begin >= keys.end) return sum;  // O and LSE of the row may be anything
    const Bounded row_delta = delta(b, h, row);
    for (int64_t key = keys.begin; key < keys.end; ++key) {
      const Pair pair = make_pair(b, h, row, static_cast<int>(key), row_delta);
      add(sum, scaled(pair.ds), x_.k, b, kv_head(h), static_cast<int>(key));
    }
    return stored(sum, keys.end - keys.begin);
  }
  // dK and dV of a key.
  void dkv(int b, int head, int key, BoundedVector* dk, BoundedVector* dv) const {
    BoundedVector sum(c_.dim), sum_v(c_.dim_v);
    const Band band = c_.band();
    const int group = c_.h.heads / c_.h.heads_kv;
    const int64_t begin = std::max<int64_t>(key - band.hi, 0),
                  end = std::min<int64_t>(key - band.lo + 1, c_.n.rows_q);
    for (int h = head * group; h < (head + 1) * group; ++h)
      for (int64_t r = begin; r < end; ++r) {
        const int row = static_cast<int>(r);
        const Pair pair = make_pair(b, h, row, key, delta(b, h, row));
        add(sum, scaled(pair.ds), x_.q, b, h, row);
        add(sum_v, pair.p, x_.dout, b, h, row);
      }
    *dk = stored(sum, (end - begin) * group);
    *dv = stored(sum_v, (end - begin) * group);
  }
  // The gradient of a head's sink.
  Bounded dsink(int h) const {
    Bounded sum;
    const Columns rows = c_.attending();
    for (int b = 0; b < c_.h.batch; ++b)
      for (int row = 0; row < c_.n.rows_q; ++row) {
        const int64_t at = (int64_t{b} * c_.h.heads + h) * c_.n.rows_q + row;
        const bool attends = row >= rows.begin && row < rows.end;
        // A row without keys has O = 0 and its sink as LSE.
        const Bounded d =
            attends ? delta(b, h, row) : Bounded{c_.dlse ? -double{x_.dlse[at]} : 0, 0};
        const double p = attends ? std::exp(double{x_.sink[h]} - x_.lse[at]) : 1;
        sum.value -= p * d.value;
        sum.error += p * (d.error + 0x1p-22 * std::fabs(d.value));
      }
    sum.error += 0x1p-22 * std::fabs(sum.value) + 0x1p-100;
    return sum;
  }

 private:
  // P and dS of a row and a key, with the error that both have as operands of 16 bits.
  struct Pair {
    Bounded p, ds;
  };

  // The unit roundoffs of the type and of single precision, and what underflows in the type.
  double half() const { return c_.type == Type::kBf16 ? 0x1p-8 : 0x1p-11; }
  double tiny() const { return c_.type == Type::kBf16 ? 0x1p-126 : 0x1p-25; }
  static constexpr double kUnit = 0x1p-24;

  int kv_head(int h) const { return h / (c_.h.heads / c_.h.heads_kv); }
  double scale() const { return 1 / std::sqrt(static_cast<float>(c_.dim)); }
  double value(const Tensor& t, int b, int h, int r, int d) const {
    return c_.decode(t.memory[t.index(b, h, r, d)]);
  }
  // A dot product in single precision.
  Bounded dot(const Tensor& x, int hx, int rx, const Tensor& y, int hy, int ry, int b,
              int dim) const {
    double sum = 0, size = 0;
    for (int d = 0; d < dim; ++d) {
      const double product = value(x, b, hx, rx, d) * value(y, b, hy, ry, d);
      sum += product;
      size += std::fabs(product);
    }
    return {sum, kUnit * (dim / 2 + 4) * size};
  }
  Bounded delta(int b, int h, int row) const {
    Bounded d = dot(x_.dout, h, row, x_.o, h, row, b, c_.dim_v);
    if (c_.dlse) {
      const double dlse = x_.dlse[(int64_t{b} * c_.h.heads + h) * c_.n.rows_q + row];
      d.value -= dlse;
      d.error += kUnit * std::fabs(dlse);
    }
    return d;
  }
  Pair make_pair(int b, int h, int row, int key, const Bounded& delta) const {
    const Bounded score = dot(x_.q, h, row, x_.k, kv_head(h), key, b, c_.dim);
    const double lse = x_.lse[(int64_t{b} * c_.h.heads + h) * c_.n.rows_q + row];
    const double x = scale() * score.value;
    const double p = std::exp(x - lse);
    // Of log2: the score, its product with the scale, LSE and their difference.
    const double unsure = scale() * score.error + 4 * kUnit * (std::fabs(x) + std::fabs(lse) + 2);
    const Bounded dp = dot(x_.dout, h, row, x_.v, kv_head(h), key, b, c_.dim_v);
    const double ds = p * (dp.value - delta.value);
    const double terms =
        dp.error + delta.error + 2 * kUnit * (std::fabs(dp.value) + std::fabs(delta.value));
    return {{p, p * (unsure + half()) + tiny()},
            {ds, p * terms + std::fabs(ds) * (unsure + 2 * kUnit + half()) + tiny()}};
  }
  Bounded scaled(const Bounded& x) const { return {scale() * x.value, scale() * x.error}; }

  void add(BoundedVector& sum, const Bounded& factor, const Tensor& t, int b, int h, int r) const {
    for (size_t d = 0; d < sum.size(); ++d) {
      const double x = value(t, b, h, r, static_cast<int>(d));
      sum[d].value += factor.value * x;
      sum[d].error += factor.error * std::fabs(x);
      sum[d].size += std::fabs(factor.value * x);
    }
  }
  // Adds the error of a sum of `count` products, and that of the stored result.
  BoundedVector stored(BoundedVector sum, int64_t count) const {
    if (count <= 0) return sum;  // exactly zero
    for (Bounded& x : sum)
      x.error += kUnit * (static_cast<double>(count) / 2 + 8) * x.size +
                 half() * std::fabs(x.value) + tiny();
    return sum;
  }

  const BackwardCase& c_;
  const BackwardData& x_;
};

}  // namespace tea::primitives
