// How many bytes each tensor of a problem takes: handlers check the buffers that a program passes.
#pragma once
#include <cstdint>
#include <initializer_list>

#include "te_attention.h"

namespace tea::jax {

// One more operand than the tensors of the C API: tea_run::origin_device, int64 [4], or [batch, 5]
// with a shift of the diagonal.
constexpr int32_t kOrigin = TEA_TENSOR_COUNT;
constexpr uint64_t kOriginBytes = 4 * sizeof(int64_t);
constexpr int64_t kOriginNumbers = 5;

// element * the product of the sizes. Throws std::runtime_error for a negative one, or overflow.
uint64_t product(uint64_t element, std::initializer_list<int64_t> sizes);

// The bytes of tensor `index` (or kOrigin), contiguous. `problem` is normalised and valid. Throws
// std::runtime_error for sizes of `run` that are negative or whose product overflows.
uint64_t bytes_of(const tea_problem& problem, const tea_run& run, int32_t index);

// The bytes of an origin for each sequence. Throws as bytes_of().
uint64_t origin_bytes(const tea_problem& problem, const tea_run& run);

// Throws std::runtime_error if the problem has strides: arrays of XLA are contiguous.
void require_contiguous(const tea_problem& problem);

}  // namespace tea::jax
