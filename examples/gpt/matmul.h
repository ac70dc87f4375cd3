// Matrix products for the linear layers: forward and the two gradients. Row-major, single-threaded
// (the shards of a step are what runs in parallel).
#pragma once
#include <cstdint>
#include <span>

namespace gpt {

using In = std::span<const float>;
using Out = std::span<float>;

struct Linear {
  int64_t rows, in, out;  // x [rows, in], w [in, out], y [rows, out]
};

// y = x w
void matmul(const Linear& size, In x, In w, Out y);
// dx = dy w^T
void matmul_backward_input(const Linear& size, In dy, In w, Out dx);
// dw += x^T dy
void matmul_backward_weight(const Linear& size, In x, In dy, Out dw);

}  // namespace gpt
