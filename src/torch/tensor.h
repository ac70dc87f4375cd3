// PyTorch's tensors: sizes, strides, types, memory and device. Only where_is() distinguishes the
// host from a GPU.
#pragma once
#include <initializer_list>
#include <string>

#include "frontend/tensor.h"
#include "te_attention_ops.h"
#include "torch/stack.h"

namespace tea::torch_ops {

using frontend::refuse;
using frontend::shape_text;
using frontend::sized;

// Throws the text of tea_error() unless `status` is TEA_OK.
void require(tea_status status);

// Device and stream in the form of the C API.
struct Where {
  int device = -1;
  void* stream = nullptr;
};
// Only the device: this takes less time.
int device_of(const char* name, const Tensor& tensor);
// Refuses a tensor that is not on this device; -1: the host.
void require_device(const char* name, const Tensor& tensor, int device);
Where where_is(const char* name, const Tensor& tensor);

// The tensor in the form of src/frontend. `name`: the argument, for errors.
frontend::Tensor view_of(const char* name, const Tensor& tensor);

// Only a tensor's address and shape: this takes less time.
struct View : frontend::Tensor {
  explicit View(const torch_ops::Tensor& tensor);
};

// Whether the elements are stored without gaps, in any order of dimensions.
bool is_dense(const View& view);

// A tea_dtype, or TEA_DTYPE_DEFAULT for any other type.
int32_t dtype_of(const Tensor& tensor);
std::string dtype_text(const Tensor& tensor);  // as in "float16"
int32_t torch_dtype(int32_t dtype);
int32_t torch_int32();
int32_t torch_int64();
int32_t torch_byte();
int32_t torch_bool();

// Uninitialised memory on the device of `like`: contiguous, or with the given strides.
Tensor empty(const Tensor& like, int32_t dtype, int rank, const int64_t* size,
             const int64_t* stride = nullptr);
Tensor empty(const Tensor& like, int32_t dtype, std::initializer_list<int64_t> size);
Tensor empty_on_host(int32_t dtype, int64_t size);
Tensor empty_contiguous_like(const Tensor& like);
// As torch.empty_like: keeps strides without gaps or overlaps.
Tensor new_like(const Tensor& like);

// Checks device, contiguity and type of an argument, and returns its address.
struct Place {
  Where where;
  explicit Place(const Where& w) : where(w) {}
  Place(const char* name, const Tensor& tensor) : where(where_is(name, tensor)) {}

  void* memory(const char* name, const Tensor& tensor) const;
  void* memory(const char* name, const Tensor& tensor, int32_t torch_dtype) const;
  // The same for what is done to each element alone: the order of dimensions may be any.
  void* dense_memory(const char* name, const Tensor& tensor) const;
  template <class T>
  T* as(const char* name, const Tensor& tensor, int32_t torch_dtype) const {
    return static_cast<T*>(memory(name, tensor, torch_dtype));
  }
  int32_t* int32(const char* name, const Tensor& t) const {
    return as<int32_t>(name, t, torch_int32());
  }
  int64_t* int64(const char* name, const Tensor& t) const {
    return as<int64_t>(name, t, torch_int64());
  }
  float* fp32(const char* name, const Tensor& t) const {
    return as<float>(name, t, torch_dtype(TEA_FP32));
  }
};

}  // namespace tea::torch_ops
