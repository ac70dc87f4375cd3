// One trained layer's real attention, checked against the float64 oracle of the tests.
#pragma once
#include <string>
#include <vector>

#include "model.h"

namespace gpt {

struct Compared {
  std::string name;
  double error;  // the largest
  double share;  // the largest error as a multiple of the bound of its element
  bool right;    // all elements within twice their bounds, as the oracle asks
};

// `block` as forward and backward left it; for O, LSE, dQ, dK and dV.
std::vector<Compared> compare_with_oracle(const Config& config, const Activations::Block& block);

}  // namespace gpt
