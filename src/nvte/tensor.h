// The object behind an NVTETensor, and the look-up from the handle. Code inside the library uses
// these functions and no nvte_ function, whose name another library in the process may also export.
#pragma once
#include <cstdint>
#include <span>
#include <string>

#include "nvte/error.h"
#include "transformer_engine/transformer_engine.h"

namespace tea::nvte {

inline constexpr size_t kMaxDims = sizeof(NVTEShape::data) / sizeof(NVTEShape::data[0]);
inline constexpr NVTEBasicTensor kAbsent = {nullptr, kNVTEFloat32, {{0}, 1}};

// The "has data" rule: a NULL pointer with a shape other than {0} is present.
inline bool present(const NVTEBasicTensor& part) {
  return part.data_ptr != nullptr || part.shape.ndim != 1 || part.shape.data[0] != 0;
}

inline size_t numel(const NVTEShape& shape) {
  size_t product = 1;
  for (size_t i = 0; i < shape.ndim; ++i) product *= shape.data[i];
  return product;
}

NVTEShape make_shape(const size_t* data, size_t ndim);
std::string text(const NVTEShape& shape);  // "[2, 5, 64]"
size_t bits_of(NVTEDType type);            // of one element; throws on a value outside the enum
size_t bytes_of(NVTEDType type);           // throws for kNVTEFloat4E2M1 too
inline bool is_fp8(NVTEDType type) { return type == kNVTEFloat8E4M3 || type == kNVTEFloat8E5M2; }

}  // namespace tea::nvte

namespace transformer_engine {

// In this namespace because fused_attn/fused_attn_f16_arbitrary_seqlen.h names it.
struct Tensor {
  NVTEBasicTensor data = tea::nvte::kAbsent;
  NVTEBasicTensor columnwise_data = tea::nvte::kAbsent;
  NVTEBasicTensor amax = tea::nvte::kAbsent;
  NVTEBasicTensor columnwise_amax = tea::nvte::kAbsent;
  NVTEBasicTensor scale = tea::nvte::kAbsent;
  NVTEBasicTensor scale_inv = tea::nvte::kAbsent;
  NVTEBasicTensor columnwise_scale_inv = tea::nvte::kAbsent;
  NVTEScalingMode scaling_mode = NVTE_DELAYED_TENSOR_SCALING;
  uint8_t with_gemm_swizzled_scales = 0;

  bool has_data() const { return tea::nvte::present(data); }
  bool has_columnwise_data() const { return tea::nvte::present(columnwise_data); }
  // The rowwise part, or the columnwise part if only that is present.
  const NVTEBasicTensor& stored() const {
    return !has_data() && has_columnwise_data() ? columnwise_data : data;
  }
  NVTEDType dtype() const { return stored().dtype; }
  // The logical shape. Throws for a scaling mode that does not define one.
  NVTEShape shape() const;
  size_t numel() const { return tea::nvte::numel(shape()); }
};

}  // namespace transformer_engine

namespace tea::nvte {

using transformer_engine::Tensor;

// NULL for a handle that was never created. Does not lock.
Tensor* find(NVTETensor handle);
// As find(), but throws "Invalid tensor." instead of returning NULL.
Tensor& tensor(NVTETensor handle);
// As above, with the parameter's name in the message. For use within TEA_NVTE_EXPORTED, which adds
// the function's name.
Tensor& tensor(const char* name, NVTETensor handle);
#define TEA_TENSOR(parameter) ::tea::nvte::tensor(#parameter, parameter)

// create() creates all handles or none. destroy() skips NULL.
void create(NVTEScalingMode mode, std::span<NVTETensor> handles);
void destroy(std::span<const NVTETensor> handles);

}  // namespace tea::nvte
