// Handles to the buffers of a test.
#pragma once
#include <vector>

#include "ops/buffer.h"
#include "transformer_engine/transformer_engine.h"

namespace tea::nvte::test {

inline transformer_engine::TensorWrapper handle_of(Buffer& buffer,
                                                   const std::vector<size_t>& shape) {
  using transformer_engine::DType;
  constexpr DType kTypes[] = {DType::kNumTypes,  DType::kFloat16,  DType::kBFloat16,
                              DType::kFloat32,   DType::kNumTypes, DType::kFloat8E4M3,
                              DType::kFloat8E5M2};
  return {buffer.data(), shape, kTypes[buffer.dtype()]};
}

inline transformer_engine::TensorWrapper ints(std::vector<int32_t>& values) {
  return {values.data(), std::vector<size_t>{values.size()}, transformer_engine::DType::kInt32};
}

}  // namespace tea::nvte::test
