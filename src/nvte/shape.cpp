// Shapes, types and sizes of tensors, and the functions of the C API that return them.
#include <algorithm>
#include <iterator>

#include "nvte/tensor.h"

namespace tea::nvte {

NVTEShape make_shape(const size_t* data, size_t ndim) {
  TEA_NVTE_CHECK(ndim <= kMaxDims, "A shape of ", ndim, " dimensions; needs at most ", kMaxDims,
                 ".");
  NVTEShape shape = {};
  if (data != nullptr) std::copy_n(data, ndim, shape.data);
  shape.ndim = ndim;
  return shape;
}

size_t bits_of(NVTEDType type) {
  static constexpr size_t kBits[] = {8, 16, 32, 64, 32, 16, 16, 8, 8, 8, 4};
  static_assert(std::size(kBits) == kNVTENumTypes);
  TEA_NVTE_CHECK(type >= 0 && type < kNVTENumTypes, "Invalid type ", type, "; needs 0 to ",
                 kNVTENumTypes - 1, ".");
  return kBits[type];
}

size_t bytes_of(NVTEDType type) {
  const size_t bits = bits_of(type);
  TEA_NVTE_CHECK(bits % 8 == 0, "An element of type ", type, " has ", bits,
                 " bits, not a number of bytes.");
  return bits / 8;
}

}  // namespace tea::nvte

NVTEShape transformer_engine::Tensor::shape() const {
  TEA_NVTE_CHECK(
      scaling_mode >= NVTE_DELAYED_TENSOR_SCALING && scaling_mode <= NVTE_NVFP4_1D_SCALING,
      "A tensor of scaling mode ", scaling_mode, " has no shape; needs 0 to ",
      NVTE_NVFP4_1D_SCALING, ".");
  NVTEShape shape = stored().shape;
  const bool transposed = &stored() == &columnwise_data && scaling_mode != NVTE_MXFP8_1D_SCALING;
  if (transposed && shape.ndim > 0)
    std::rotate(shape.data, shape.data + 1, shape.data + shape.ndim);
  return shape;
}

using tea::nvte::bits_of;
using tea::nvte::bytes_of;
using tea::nvte::find;
using tea::nvte::Tensor;

namespace {

// A part of a tensor; absent for an invalid handle.
const NVTEBasicTensor& part(NVTETensor handle, NVTEBasicTensor Tensor::*member) {
  const Tensor* tensor = find(handle);
  return tensor != nullptr ? tensor->*member : tea::nvte::kAbsent;
}

float* float_part(NVTETensor handle, NVTEBasicTensor Tensor::*member, const char* name) {
  const NVTEBasicTensor& found = part(handle, member);
  TEA_NVTE_CHECK(found.dtype == kNVTEFloat32, name, " has type ", found.dtype,
                 "; needs kNVTEFloat32 (", kNVTEFloat32, ").");
  return static_cast<float*>(found.data_ptr);
}

NVTEDType type_of(NVTETensor handle) {
  const Tensor* tensor = find(handle);
  return tensor != nullptr ? tensor->dtype() : kNVTEFloat32;
}

}  // namespace

NVTEShape nvte_make_shape(const size_t* data, size_t ndim) {
  return tea::nvte::make_shape(data, ndim);
}

void* nvte_tensor_data(const NVTETensor tensor) { return part(tensor, &Tensor::data).data_ptr; }

void* nvte_tensor_columnwise_data(const NVTETensor tensor) {
  return part(tensor, &Tensor::columnwise_data).data_ptr;
}

float* nvte_tensor_amax(const NVTETensor tensor) {
  return float_part(tensor, &Tensor::amax, "amax");
}

float* nvte_tensor_scale(const NVTETensor tensor) {
  return float_part(tensor, &Tensor::scale, "scale");
}

float* nvte_tensor_scale_inv(const NVTETensor tensor) {
  return static_cast<float*>(part(tensor, &Tensor::scale_inv).data_ptr);
}

void* nvte_tensor_columnwise_scale_inv(const NVTETensor tensor) {
  return part(tensor, &Tensor::columnwise_scale_inv).data_ptr;
}

NVTEShape nvte_tensor_shape(const NVTETensor tensor) { return tea::nvte::tensor(tensor).shape(); }

size_t nvte_tensor_ndims(const NVTETensor tensor) { return tea::nvte::tensor(tensor).shape().ndim; }

size_t nvte_tensor_size(const NVTETensor tensor, const size_t dim) {
  const NVTEShape shape = tea::nvte::tensor(tensor).shape();
  TEA_NVTE_CHECK(dim < shape.ndim, "Dimension ", dim, " of a tensor with ", shape.ndim,
                 " dimensions.");
  return shape.data[dim];
}

size_t nvte_tensor_numel(const NVTETensor tensor) { return tea::nvte::tensor(tensor).numel(); }

NVTEShape nvte_tensor_columnwise_shape(const NVTETensor tensor) {
  return tea::nvte::tensor(tensor).columnwise_data.shape;
}

NVTEShape nvte_tensor_scale_inv_shape(const NVTETensor tensor) {
  return part(tensor, &Tensor::scale_inv).shape;
}

NVTEDType nvte_tensor_type(const NVTETensor tensor) { return type_of(tensor); }

size_t nvte_tensor_element_size(const NVTETensor tensor) { return bytes_of(type_of(tensor)); }

size_t nvte_tensor_element_size_bits(const NVTETensor tensor) { return bits_of(type_of(tensor)); }

size_t nvte_tensor_size_bytes(const NVTETensor tensor) {
  const Tensor* found = find(tensor);
  return found != nullptr ? found->numel() * bits_of(found->dtype()) / 8 : 0;
}

NVTEScalingMode nvte_tensor_scaling_mode(const NVTETensor tensor) {
  if (tensor == nullptr) return NVTE_DELAYED_TENSOR_SCALING;
  return tea::nvte::tensor(tensor).scaling_mode;
}

bool transformer_engine::is_fp8_dtype(const DType type) {
  return tea::nvte::is_fp8(static_cast<NVTEDType>(type));
}

size_t transformer_engine::typeToSize(const DType type) {
  return bytes_of(static_cast<NVTEDType>(type));
}
