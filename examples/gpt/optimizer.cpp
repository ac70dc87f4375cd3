// AdamW.
#include "optimizer.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace gpt {
namespace {

constexpr float kBeta1 = 0.9f, kBeta2 = 0.98f, kEpsilon = 1e-8f, kMaxNorm = 1;

float clip(In gradient) {
  double sum = 0;
  for (const float g : gradient) sum += double(g) * g;
  return std::min(1.0f, kMaxNorm / static_cast<float>(std::sqrt(sum)));
}

}  // namespace

Optimizer::Optimizer(const Config& config, int64_t size, int64_t decayed)
    : config_(config), decayed_(decayed), mean_(size), square_(size) {}

float Optimizer::rate(int step) const {
  const Config& c = config_;
  const float done = static_cast<float>(step + 1) / static_cast<float>(c.steps);
  if (done < c.warm_up) return c.rate * (done / c.warm_up);
  const float angle = std::numbers::pi_v<float> * (done - c.warm_up) / (1 - c.warm_up);
  return c.last_rate + (c.rate - c.last_rate) * (1 + std::cos(angle)) / 2;
}

void Optimizer::update(In gradient, Out weights) {
  const float rate = this->rate(step_++), scale = clip(gradient);
  // The running means start at zero; dividing by these removes that bias.
  const float correct1 = 1 - std::pow(kBeta1, static_cast<float>(step_));
  const float correct2 = 1 - std::pow(kBeta2, static_cast<float>(step_));
  for (size_t i = 0; i < weights.size(); ++i) {
    const float g = gradient[i] * scale;
    mean_[i] += (1 - kBeta1) * (g - mean_[i]);
    square_[i] += (1 - kBeta2) * (g * g - square_[i]);
    const float decay = static_cast<int64_t>(i) < decayed_ ? config_.decay * weights[i] : 0;
    const float along = mean_[i] / correct1 / (std::sqrt(square_[i] / correct2) + kEpsilon);
    weights[i] -= rate * (along + decay);
  }
}

}  // namespace gpt
