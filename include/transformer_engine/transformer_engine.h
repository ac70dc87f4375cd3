/* transformer_engine.h: tensor handles, in the form of TransformerEngine's C API (names, values and
   signatures of its commit f04b094c). C11, C++20 and nvcc; CUDA's headers are not needed.

   Not affiliated with NVIDIA. Every function here that can fail throws std::runtime_error through
   extern "C", as TransformerEngine does, so only C++ may let a call fail; te_attention.h is the API
   with status codes. The text reads "file:line in function name: message"; the message of a failed
   check begins with "Assertion failed: <expression>. ".

   Quantisation configs and grouped tensors are omitted, because no function of attention uses them.
 */
#ifndef TRANSFORMER_ENGINE_TRANSFORMER_ENGINE_H_
#define TRANSFORMER_ENGINE_TRANSFORMER_ENGINE_H_

#include <stddef.h>
#ifdef __cplusplus
#include <vector>
#endif

typedef struct CUstream_st* cudaStream_t; /* the same typedef as in CUDA's headers */

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

typedef enum NVTEDType {
  kNVTEByte = 0,
  kNVTEInt16 = 1,
  kNVTEInt32 = 2,
  kNVTEInt64 = 3,
  kNVTEFloat32 = 4,
  kNVTEFloat16 = 5,
  kNVTEBFloat16 = 6,
  kNVTEFloat8E4M3 = 7,
  kNVTEFloat8E5M2 = 8,
  kNVTEFloat8E8M0 = 9,
  kNVTEFloat4E2M1 = 10, /* 4 bits an element */
  kNVTENumTypes = 11
} NVTEDType;

typedef enum NVTEScalingMode {
  NVTE_DELAYED_TENSOR_SCALING = 0, /* not quantised, or one scale for the tensor (of any recipe) */
  NVTE_MXFP8_1D_SCALING = 1,
  NVTE_BLOCK_SCALING_1D = 2,
  NVTE_BLOCK_SCALING_2D = 3,
  NVTE_NVFP4_1D_SCALING = 4,
  NVTE_INVALID_SCALING = 100
} NVTEScalingMode;

/* The parts of a tensor. Each is an NVTEBasicTensor, except where noted. */
typedef enum NVTETensorParam {
  kNVTERowwiseData = 0,
  kNVTEColumnwiseData = 1,
  kNVTEScale = 2,
  kNVTEAmax = 3,
  kNVTERowwiseScaleInv = 4,
  kNVTEColumnwiseScaleInv = 5,
  kNVTEColumnwiseAmax = 6,
  kNVTEWithGEMMSwizzledScales = 7, /* one byte: 0 or 1 */
  kNVTENumTensorParams = 8
} NVTETensorParam;

typedef struct NVTEShape {
  size_t data[15]; /* only the first ndim are used */
  size_t ndim;
} NVTEShape;

/* Memory of the caller with its type and shape. An absent tensor is {NULL, kNVTEFloat32, {0}}; a
   NULL pointer with any other shape counts as present and requests the sizes. */
typedef struct NVTEBasicTensor {
  void* data_ptr;
  NVTEDType dtype;
  NVTEShape shape;
} NVTEBasicTensor;

/* An opaque handle: a 1-based index into a table of this process, not a pointer. NULL is "none".
   The handle of a destroyed tensor refers to an empty tensor until the index is reused. */
typedef void* NVTETensor;

/* A fixed array of handles, for the auxiliary tensors of forward and backward. */
typedef struct NVTETensorPack {
#ifdef __cplusplus
  static constexpr int MAX_SIZE = 10;
  NVTETensor tensors[MAX_SIZE];
  size_t size = 0;
#else
  NVTETensor tensors[10];
  size_t size; /* set it to 0: C has no default member value */
#endif
} NVTETensorPack;

/* --- Lifetime: from any thread; the memory of a tensor is never accessed. --- */

/* A tensor with every part absent. Throws when the table is full (68985 live tensors). */
NVTETensor nvte_create_tensor(NVTEScalingMode scaling_mode);
/* NULL is allowed. Throws on a handle that was never created or is already destroyed. */
void nvte_destroy_tensor(NVTETensor tensor);
/* Creates `count` tensors; if it throws, none is created. */
void nvte_create_tensors(NVTEScalingMode scaling_mode, NVTETensor* tensors, size_t count);
void nvte_destroy_tensors(NVTETensor* tensors, size_t count);
/* Fills all ten entries with new tensors of mode NVTE_DELAYED_TENSOR_SCALING; leaves `size`. */
void nvte_tensor_pack_create(NVTETensorPack* pack);
/* Destroys all ten entries and sets them to NULL. */
void nvte_tensor_pack_destroy(NVTETensorPack* pack);

/* --- Parts --- */

/* Sets one part; every parameter. `size_in_bytes` is at least that of the parameter: 144 for an
   NVTEBasicTensor, 1 for the flag. Throws on an unknown parameter, a NULL `buf`, a buffer that is
   too small, more than 15 dimensions, an invalid handle. */
void nvte_set_tensor_param_v2(NVTETensor tensor, NVTETensorParam param, const void* buf,
                              size_t size_in_bytes);
/* Reads one part; `size_written` (may be NULL) receives the parameter's size. buf == NULL requests
   only the size. An invalid handle reads as an empty tensor. Throws on an unknown parameter and on
   a buffer that is too small. */
void nvte_get_tensor_param_v2(const NVTETensor tensor, NVTETensorParam param, void* buf,
                              size_t size_in_bytes, size_t* size_written);
/* The older pair, for the parameters 0 to 6; others throw. The setter takes a pointer to the handle
   and throws on an invalid one; the getter reads an absent part from NULL and throws otherwise. */
void nvte_set_tensor_param(NVTETensor* tensor, NVTETensorParam param_name,
                           const NVTEBasicTensor* param);
NVTEBasicTensor nvte_get_tensor_param(const NVTETensor tensor, NVTETensorParam param_name);

/* --- Properties of a tensor --- */

/* Pointers of the caller; NULL for an invalid handle. amax and scale throw unless their type is
   kNVTEFloat32; scale_inv is returned whatever its type. */
void* nvte_tensor_data(const NVTETensor tensor);
void* nvte_tensor_columnwise_data(const NVTETensor tensor);
float* nvte_tensor_amax(const NVTETensor tensor);
float* nvte_tensor_scale(const NVTETensor tensor);
float* nvte_tensor_scale_inv(const NVTETensor tensor);
void* nvte_tensor_columnwise_scale_inv(const NVTETensor tensor);

/* The logical shape: that of the rowwise data; if only columnwise data is present, its shape with
   the first dimension moved to the end (not moved for NVTE_MXFP8_1D_SCALING). This function and the
   next three throw on an invalid handle and on NVTE_INVALID_SCALING. */
NVTEShape nvte_tensor_shape(const NVTETensor tensor);
size_t nvte_tensor_ndims(const NVTETensor tensor);
size_t nvte_tensor_size(const NVTETensor tensor, const size_t dim); /* throws if dim >= ndims */
size_t nvte_tensor_numel(const NVTETensor tensor); /* the product; 1 if there are no dimensions */
/* As stored; {0} when absent. Throws on an invalid handle. */
NVTEShape nvte_tensor_columnwise_shape(const NVTETensor tensor);
/* As stored; {0} when absent and for an invalid handle. */
NVTEShape nvte_tensor_scale_inv_shape(const NVTETensor tensor);

/* Of the rowwise data, or of the columnwise data if only that is present. For an invalid handle:
   kNVTEFloat32, 4 bytes, 32 bits, 0 bytes. element_size throws for kNVTEFloat4E2M1. */
NVTEDType nvte_tensor_type(const NVTETensor tensor);
size_t nvte_tensor_element_size(const NVTETensor tensor);
size_t nvte_tensor_element_size_bits(const NVTETensor tensor);
size_t nvte_tensor_size_bytes(const NVTETensor tensor);

/* NVTE_DELAYED_TENSOR_SCALING for NULL; throws on any other invalid handle. */
NVTEScalingMode nvte_tensor_scaling_mode(const NVTETensor tensor);

/* A shape of at most 15 dimensions; all zeros if `data` is NULL. */
NVTEShape nvte_make_shape(const size_t* data, size_t ndim);

/* --- Memory --- */

/* Fills the memory of the rowwise data and of amax, if any, with zero bytes. NULL has no effect. */
void nvte_zero_tensor(const NVTETensor tensor, cudaStream_t stream);
/* Fills `size_in_bytes` bytes with the low byte of `value`. Throws if `ptr` is NULL. */
void nvte_memset(void* ptr, int value, size_t size_in_bytes, cudaStream_t stream);

/* Whether the current GPU multiplies FP8 matrices of any transposition: 1 for compute capability
   10.x, 11.x and from 13.0 on. 0 without a GPU. */
int nvte_is_non_tn_fp8_gemm_supported(void);

#ifdef __cplusplus
} /* extern "C" */

namespace transformer_engine {

enum class DType {
  kByte = kNVTEByte,
  kInt16 = kNVTEInt16,
  kInt32 = kNVTEInt32,
  kInt64 = kNVTEInt64,
  kFloat32 = kNVTEFloat32,
  kFloat16 = kNVTEFloat16,
  kBFloat16 = kNVTEBFloat16,
  kFloat8E4M3 = kNVTEFloat8E4M3,
  kFloat8E5M2 = kNVTEFloat8E5M2,
  kFloat8E8M0 = kNVTEFloat8E8M0,
  kFloat4E2M1 = kNVTEFloat4E2M1,
  kNumTypes = kNVTENumTypes
};

// True for kFloat8E4M3 and kFloat8E5M2.
bool is_fp8_dtype(const DType type);
// Bytes of one element. Throws for kFloat4E2M1, which has half a byte, and for invalid types.
size_t typeToSize(const DType type);

}  // namespace transformer_engine
#endif
#pragma GCC visibility pop

#ifdef __cplusplus
namespace transformer_engine {

// Owns a handle, not the tensor's memory. A default-constructed wrapper is a valid tensor with
// every part absent, which is passed for "no tensor". A moved-from wrapper holds NULL.
class TensorWrapper {
 public:
  static constexpr size_t defaultData = 1;
  static constexpr NVTEShape defaultShape = {{defaultData}, 1};

  explicit TensorWrapper(const NVTEScalingMode scaling_mode = NVTE_DELAYED_TENSOR_SCALING)
      : tensor_(nvte_create_tensor(scaling_mode)) {}

  // amax, scale and a scale_inv of the default shape are one float32 each, or absent if NULL.
  TensorWrapper(void* dptr, const NVTEShape& shape, const DType dtype, float* amax_dptr = nullptr,
                float* scale_dptr = nullptr, float* scale_inv_dptr = nullptr,
                const NVTEShape scale_inv_shape = defaultShape,
                const NVTEScalingMode scaling_mode = NVTE_DELAYED_TENSOR_SCALING)
      : TensorWrapper(scaling_mode) {
    const bool no_scale_inv = scale_inv_dptr == nullptr && scale_inv_shape.ndim == 1 &&
                              scale_inv_shape.data[0] == defaultData;
    set_rowwise_data(dptr, dtype, shape);
    set_amax(amax_dptr, DType::kFloat32, amax_dptr ? defaultShape : absent_shape());
    set_scale(scale_dptr, DType::kFloat32, scale_dptr ? defaultShape : absent_shape());
    set_rowwise_scale_inv(scale_inv_dptr, DType::kFloat32,
                          no_scale_inv ? absent_shape() : scale_inv_shape);
  }
  TensorWrapper(void* dptr, const std::vector<size_t>& shape, const DType dtype,
                float* amax_dptr = nullptr, float* scale_dptr = nullptr,
                float* scale_inv_dptr = nullptr, const std::vector<size_t>& scale_inv_shape = {1},
                const NVTEScalingMode scaling_mode = NVTE_DELAYED_TENSOR_SCALING)
      : TensorWrapper(dptr, to_shape(shape), dtype, amax_dptr, scale_dptr, scale_inv_dptr,
                      to_shape(scale_inv_shape), scaling_mode) {}

  ~TensorWrapper() { nvte_destroy_tensor(tensor_); }
  TensorWrapper(const TensorWrapper&) = delete;
  TensorWrapper& operator=(const TensorWrapper&) = delete;
  TensorWrapper(TensorWrapper&& other) noexcept : tensor_(other.tensor_) {
    other.tensor_ = nullptr;
  }
  TensorWrapper& operator=(TensorWrapper&& other) noexcept {
    if (this != &other) {
      nvte_destroy_tensor(tensor_);
      tensor_ = other.tensor_;
      other.tensor_ = nullptr;
    }
    return *this;
  }

  // Setters. Shape is NVTEShape or std::vector<size_t>. They throw on a moved-from wrapper.
  template <typename Shape>
  TensorWrapper& set_parameter(const NVTETensorParam param, void* dptr, DType type,
                               const Shape& shape) {
    const NVTEBasicTensor part = {dptr, static_cast<NVTEDType>(type), to_shape(shape)};
    nvte_set_tensor_param_v2(tensor_, param, &part, sizeof(part));
    return *this;
  }
  template <typename Shape>
  TensorWrapper& set_rowwise_data(void* dptr, DType type, const Shape& shape) {
    return set_parameter(kNVTERowwiseData, dptr, type, shape);
  }
  template <typename Shape>
  TensorWrapper& set_columnwise_data(void* dptr, DType type, const Shape& shape) {
    return set_parameter(kNVTEColumnwiseData, dptr, type, shape);
  }
  template <typename Shape>
  TensorWrapper& set_scale(void* dptr, DType type, const Shape& shape) {
    return set_parameter(kNVTEScale, dptr, type, shape);
  }
  template <typename Shape>
  TensorWrapper& set_amax(void* dptr, DType type, const Shape& shape) {
    return set_parameter(kNVTEAmax, dptr, type, shape);
  }
  template <typename Shape>
  TensorWrapper& set_rowwise_scale_inv(void* dptr, DType type, const Shape& shape) {
    return set_parameter(kNVTERowwiseScaleInv, dptr, type, shape);
  }
  template <typename Shape>
  TensorWrapper& set_columnwise_scale_inv(void* dptr, DType type, const Shape& shape) {
    return set_parameter(kNVTEColumnwiseScaleInv, dptr, type, shape);
  }
  template <typename Shape>
  TensorWrapper& set_columnwise_amax(void* dptr, DType type, const Shape& shape) {
    return set_parameter(kNVTEColumnwiseAmax, dptr, type, shape);
  }
  void set_with_gemm_swizzled_scales(bool with_gemm_swizzled_scales) {
    const unsigned char flag = with_gemm_swizzled_scales;
    nvte_set_tensor_param_v2(tensor_, kNVTEWithGEMMSwizzledScales, &flag, sizeof(flag));
  }

  // Getters of parts; absent parts on a moved-from wrapper.
  NVTEBasicTensor get_parameter(const NVTETensorParam param) const {
    NVTEBasicTensor part;
    nvte_get_tensor_param_v2(tensor_, param, &part, sizeof(part), nullptr);
    return part;
  }
  NVTEBasicTensor get_rowwise_data() const { return get_parameter(kNVTERowwiseData); }
  NVTEBasicTensor get_columnwise_data() const { return get_parameter(kNVTEColumnwiseData); }
  NVTEBasicTensor get_scale() const { return get_parameter(kNVTEScale); }
  NVTEBasicTensor get_amax() const { return get_parameter(kNVTEAmax); }
  NVTEBasicTensor get_rowwise_scale_inv() const { return get_parameter(kNVTERowwiseScaleInv); }
  NVTEBasicTensor get_columnwise_scale_inv() const {
    return get_parameter(kNVTEColumnwiseScaleInv);
  }
  NVTEBasicTensor get_columnwise_amax() const { return get_parameter(kNVTEColumnwiseAmax); }
  bool get_with_gemm_swizzled_scales() const {
    unsigned char flag = 0;
    nvte_get_tensor_param_v2(tensor_, kNVTEWithGEMMSwizzledScales, &flag, sizeof(flag), nullptr);
    return flag != 0;
  }

  // The nvte_tensor_* properties; for a moved-from wrapper zero, NULL, no dimensions, kNumTypes.
  NVTETensor data() const noexcept { return tensor_; }
  NVTEShape shape() const { return tensor_ ? nvte_tensor_shape(tensor_) : NVTEShape{}; }
  NVTEShape columnwise_shape() const {
    return tensor_ ? nvte_tensor_columnwise_shape(tensor_) : NVTEShape{};
  }
  NVTEShape scale_inv_shape() const {
    return tensor_ ? nvte_tensor_scale_inv_shape(tensor_) : NVTEShape{};
  }
  size_t size(const size_t dim) const { return tensor_ ? nvte_tensor_size(tensor_, dim) : 0; }
  size_t ndim() const { return tensor_ ? nvte_tensor_ndims(tensor_) : 0; }
  size_t numel() const { return tensor_ ? nvte_tensor_numel(tensor_) : 0; }
  size_t element_size() const { return tensor_ ? nvte_tensor_element_size(tensor_) : 0; }
  size_t element_size_bits() const { return tensor_ ? nvte_tensor_element_size_bits(tensor_) : 0; }
  // Bytes of allocated memory: 0 without a pointer, for any shape.
  size_t bytes() const { return dptr() ? nvte_tensor_size_bytes(tensor_) : 0; }
  DType dtype() const {
    return tensor_ ? static_cast<DType>(nvte_tensor_type(tensor_)) : DType::kNumTypes;
  }
  void* dptr() const { return nvte_tensor_data(tensor_); }
  void* columnwise_dptr() const { return nvte_tensor_columnwise_data(tensor_); }
  float* amax() const { return nvte_tensor_amax(tensor_); }
  float* scale() const { return nvte_tensor_scale(tensor_); }
  float* scale_inv() const { return nvte_tensor_scale_inv(tensor_); }
  NVTEScalingMode scaling_mode() const { return nvte_tensor_scaling_mode(tensor_); }

  void zero_(cudaStream_t stream) { nvte_zero_tensor(tensor_, stream); }

 private:
  static NVTEShape absent_shape() { return {{0}, 1}; }
  static const NVTEShape& to_shape(const NVTEShape& shape) { return shape; }
  static NVTEShape to_shape(const std::vector<size_t>& shape) {
    return nvte_make_shape(shape.data(), shape.size());
  }

  NVTETensor tensor_ = nullptr;
};

}  // namespace transformer_engine
#endif
#endif
