// The layers that are neither a matrix product nor attention.
#include "layers.h"

#include <algorithm>
#include <cmath>

namespace gpt {
namespace {

constexpr float kEpsilon = 1e-5f;

float dot(const float* a, const float* b, size_t n) {
  float sum = 0;
  for (size_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

float inverse_rms(const float* x, size_t n) {
  return 1 / std::sqrt(dot(x, x, n) / static_cast<float>(n) + kEpsilon);
}

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
    float along = 0;  // of the gradient, along x
    for (size_t i = 0; i < dim; ++i) along += dy[row + i] * gain[i] * x[row + i];
    const float back = along * r * r / static_cast<float>(dim);
    for (size_t i = 0; i < dim; ++i) {
      dx[row + i] += r * (dy[row + i] * gain[i] - x[row + i] * back);
      dgain[i] += dy[row + i] * x[row + i] * r;
    }
  }
}

void activate(In x, Out y) {
  for (size_t i = 0; i < x.size(); ++i) {
    const float positive = std::max(x[i], 0.0f);
    y[i] = positive * positive;
  }
}

void activate_backward(In x, In dy, Out dx) {
  for (size_t i = 0; i < x.size(); ++i) dx[i] = 2 * std::max(x[i], 0.0f) * dy[i];
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
