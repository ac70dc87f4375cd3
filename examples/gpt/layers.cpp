// The layers that are neither a matrix product nor attention.
#include "layers.h"

#include <algorithm>
#include <cmath>

namespace gpt {
namespace {

constexpr float kEpsilon = 1e-5f;

// term(0) + ... + term(n - 1), in sums side by side: one sum would wait for each addition.
template <class Term>
float sum(size_t n, const Term& term) {
  constexpr size_t kSums = 16;
  float part[kSums] = {}, all = 0;
  size_t i = 0;
  for (; i + kSums <= n; i += kSums)
    for (size_t j = 0; j < kSums; ++j) part[j] += term(i + j);
  for (; i < n; ++i) all += term(i);
  for (const float each : part) all += each;
  return all;
}

float inverse_rms(const float* x, size_t n) {
  const float squares = sum(n, [&](size_t i) { return x[i] * x[i]; });
  return 1 / std::sqrt(squares / static_cast<float>(n) + kEpsilon);
}

// Twice the positive part.
float twice_positive(float x) { return x > 0 ? 2 * x : 0; }

}  // namespace

void embed(std::span<const uint8_t> bytes, In table, Out y) {
  const size_t dim = y.size() / bytes.size();
  for (size_t t = 0; t < bytes.size(); ++t) {
    std::copy_n(&table[bytes[t] * dim], dim, &y[t * dim]);
  }
}

void embed_backward(std::span<const uint8_t> bytes, In dy, Out dtable) {
  const size_t dim = dy.size() / bytes.size();
  for (size_t t = 0; t < bytes.size(); ++t) {
    add(dy.subspan(t * dim, dim), dtable.subspan(bytes[t] * dim, dim));
  }
}

void rms_norm(In x, In gain, Out y) {
  const size_t dim = gain.size();
  for (size_t row = 0; row < x.size(); row += dim) {
    const float r = inverse_rms(&x[row], dim);
    for (size_t i = 0; i < dim; ++i) y[row + i] = x[row + i] * r * gain[i];
  }
}

void rms_norm_backward(In x, In gain, In dy, Out dx, Out dgain) {
  const size_t dim = gain.size();
  for (size_t row = 0; row < x.size(); row += dim) {
    const float r = inverse_rms(&x[row], dim);
    const float along =  // of the gradient, along x
        sum(dim, [&](size_t i) { return dy[row + i] * gain[i] * x[row + i]; });
    const float back = along * r * r / static_cast<float>(dim);
    for (size_t i = 0; i < dim; ++i) {
      dx[row + i] += r * (dy[row + i] * gain[i] - x[row + i] * back);
      dgain[i] += dy[row + i] * x[row + i] * r;
    }
  }
}

void activate(In x, Out y) {
  for (size_t i = 0; i < x.size(); ++i) {
    const float positive = twice_positive(x[i]) / 2;
    y[i] = positive * positive;
  }
}

void activate_backward(In x, In dy, Out dx) {
  for (size_t i = 0; i < x.size(); ++i) dx[i] = twice_positive(x[i]) * dy[i];
}

void add(In x, Out y) {
  for (size_t i = 0; i < x.size(); ++i) y[i] += x[i];
}

double cross_entropy(std::span<const uint8_t> targets, float scale, Out logits) {
  const size_t classes = logits.size() / targets.size();
  double loss = 0;
  for (size_t t = 0; t < targets.size(); ++t) {
    const Out row = logits.subspan(t * classes, classes);
    const float top = *std::max_element(row.begin(), row.end());
    const float wanted = row[targets[t]] - top;
    float sum = 0;
    for (float& x : row) sum += x = std::exp(x - top);
    loss += std::log(sum) - wanted;
    for (float& x : row) x *= scale / sum;
    row[targets[t]] -= scale;
  }
  return loss;
}

}  // namespace gpt
