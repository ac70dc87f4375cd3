// AdamW (Loshchilov and Hutter 2019) with clipping of the gradient's norm, and the learning rate.
#pragma once
#include <vector>

#include "config.h"
#include "matmul.h"

namespace gpt {

class Optimizer {
 public:
  // The first `decayed` of `size` weights decay.
  Optimizer(const Config& config, int64_t size, int64_t decayed);
  void update(In gradient, Out weights);
  float rate(int step) const;  // linear warm-up, then half a cosine

 private:
  Config config_;
  int64_t decayed_;
  int step_ = 0;
  std::vector<float> mean_, square_;
};

}  // namespace gpt
