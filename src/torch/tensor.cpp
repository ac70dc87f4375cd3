// The only file that uses torch's names of types and devices.
#include "torch/tensor.h"

#include <torch/csrc/stable/ops.h>

#include <stdexcept>

// torch declares it in builds with CUDA only. It is weak, because a torch without CUDA does not
// define it; there are no CUDA tensors then.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(
    int32_t device_index, void** ret_stream);

namespace tea::torch_ops {

void require(tea_status status) {
  if (status != TEA_OK) throw std::runtime_error(tea_error());
}

int device_of(const char* name, const Tensor& tensor) {
  static const int32_t kCpu = aoti_torch_device_type_cpu(), kCuda = aoti_torch_device_type_cuda();
  int32_t type, index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
  if (type == kCpu) return -1;
  if (type != kCuda || !aoti_torch_get_current_cuda_stream)
    refuse(name, "on another kind of device", "the CPU or a CUDA device");
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &index));
  return index;
}

namespace {
std::string device_text(int i) { return i < 0 ? "cpu" : "cuda:" + std::to_string(i); }
}  // namespace

void require_device(const char* name, const Tensor& tensor, int device) {
  frontend::Tensor view;
  view.device = device_of(name, tensor);
  frontend::require_device(name, view, device);
}

Where where_is(const char* name, const Tensor& tensor) {
  Where out{device_of(name, tensor), nullptr};
  if (out.device < 0) return out;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(out.device, &out.stream));
  return out;
}

namespace {

void set_shape(frontend::Tensor& view, const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  view.data = tensor.data_ptr();
  view.rank = static_cast<int>(sizes.size());
  view.size = sizes.data();
  view.stride = tensor.strides().data();
}

struct TypeRow {
  int32_t type;  // a tea_dtype, or one of frontend/tensor.h
  int32_t torch;
};
const TypeRow kTypes[] = {
    {TEA_FP16, aoti_torch_dtype_float16()},       {TEA_BF16, aoti_torch_dtype_bfloat16()},
    {TEA_FP32, aoti_torch_dtype_float32()},       {TEA_FP64, aoti_torch_dtype_float64()},
    {TEA_E4M3, aoti_torch_dtype_float8_e4m3fn()}, {TEA_E5M2, aoti_torch_dtype_float8_e5m2()},
    {frontend::kInt32, aoti_torch_dtype_int32()}, {frontend::kInt64, aoti_torch_dtype_int64()},
    {frontend::kUint8, aoti_torch_dtype_uint8()}, {frontend::kBool, aoti_torch_dtype_bool()},
};

int32_t raw_dtype(const Tensor& tensor) {
  int32_t out;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &out));
  return out;
}

int32_t type_of(int32_t torch) {
  for (const TypeRow& row : kTypes)
    if (row.torch == torch) return row.type;
  return frontend::kOtherType;
}

}  // namespace

frontend::Tensor view_of(const char* name, const Tensor& tensor) {
  frontend::Tensor view;
  set_shape(view, tensor);
  view.type = type_of(raw_dtype(tensor));
  view.device = device_of(name, tensor);
  return view;
}

View::View(const torch_ops::Tensor& tensor) { set_shape(*this, tensor); }

int32_t dtype_of(const Tensor& tensor) {
  const int32_t type = type_of(raw_dtype(tensor));
  return type < frontend::kInt32 ? type : TEA_DTYPE_DEFAULT;
}

std::string dtype_text(const Tensor& tensor) {
  return frontend::type_text(type_of(raw_dtype(tensor)));
}

int32_t torch_dtype(int32_t dtype) {
  for (const TypeRow& row : kTypes)
    if (row.type == dtype && dtype < frontend::kInt32) return row.torch;
  refuse("dtype", std::to_string(dtype), "a type of te_attention.h");
}

int32_t torch_int32() { return aoti_torch_dtype_int32(); }
int32_t torch_int64() { return aoti_torch_dtype_int64(); }
int32_t torch_bool() { return aoti_torch_dtype_bool(); }
int32_t torch_byte() { return aoti_torch_dtype_uint8(); }

namespace {

int64_t bytes_of(int rank, const int64_t* size, int32_t dtype) {
  int64_t bytes = frontend::type_bytes(type_of(dtype));
  for (int i = 0; i < rank; ++i) bytes *= size[i];
  return bytes;
}

// The shim of PyTorch's allocator says only that it failed. The Python package recognises this text
// and raises torch.OutOfMemoryError.
[[noreturn]] void refuse_memory(const Tensor& like, int64_t bytes) {
  throw std::runtime_error("out of memory: " + std::to_string(bytes) + " bytes on " +
                           device_text(device_of("q", like)));
}

}  // namespace

Tensor empty(const Tensor& like, int32_t dtype, int rank, const int64_t* size,
             const int64_t* stride) {
  int64_t contiguous[8];
  if (!stride) {
    int64_t step = 1;
    for (int i = rank - 1; i >= 0; --i) {
      if (size[i] < 0)  // before PyTorch prints a backtrace of its own
        refuse("a result", "of shape " + shape_text(rank, size), "0 or more in each dimension");
      contiguous[i] = step;
      step *= size[i] > 1 ? size[i] : 1;
    }
    stride = contiguous;
  }
  int32_t type, index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  AtenTensorHandle out;
  if (aoti_torch_empty_strided(rank, size, stride, dtype, type, index, &out))
    refuse_memory(like, bytes_of(rank, size, dtype));
  return Tensor(out);
}

Tensor empty(const Tensor& like, int32_t dtype, std::initializer_list<int64_t> size) {
  return empty(like, dtype, static_cast<int>(size.size()), size.begin());
}

Tensor empty_on_host(int32_t dtype, int64_t size) {
  const int64_t stride = 1;
  AtenTensorHandle out;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(1, &size, &stride, dtype, aoti_torch_device_type_cpu(), 0, &out));
  return Tensor(out);
}

Tensor empty_contiguous_like(const Tensor& like) {
  const View view(like);
  return empty(like, raw_dtype(like), view.rank, view.size);
}

bool is_dense(const View& view) {
  int64_t step = 1;
  for (int64_t left = view.elements(); left > 1;) {
    int next = 0;
    while (next < view.rank && (view.size[next] == 1 || view.stride[next] != step)) ++next;
    if (next == view.rank) return false;
    step *= view.size[next], left /= view.size[next];
  }
  return view.elements() > 0;
}

Tensor new_like(const Tensor& like) {
  const View view(like);
  // PyTorch's empty_like goes through the dispatcher, which looks operators up by name.
  if (!is_dense(view)) return torch::stable::empty_like(like);
  return empty(like, raw_dtype(like), view.rank, view.size, view.stride);
}

void* Place::memory(const char* name, const Tensor& tensor) const {
  const frontend::Tensor view = view_of(name, tensor);
  return frontend::require_memory(name, view, view.type, where.device);
}

void* Place::dense_memory(const char* name, const Tensor& tensor) const {
  if (!is_dense(View(tensor))) return memory(name, tensor);
  require_device(name, tensor, where.device);
  return tensor.data_ptr();
}

void* Place::memory(const char* name, const Tensor& tensor, int32_t dtype) const {
  return frontend::require_memory(name, view_of(name, tensor), type_of(dtype), where.device);
}

}  // namespace tea::torch_ops
