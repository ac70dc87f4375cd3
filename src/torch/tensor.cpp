// The only file that knows how torch names types and devices.
#include "torch/tensor.h"

#include <torch/csrc/stable/ops.h>

#include <stdexcept>

// Declared by torch for builds with CUDA only. Weak: a torch without CUDA does not define it, and
// then there is no CUDA tensor to ask for.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(
    int32_t device_index, void** ret_stream);

namespace tea::torch_ops {

void refuse(const std::string& name, const std::string& seen, const std::string& needed) {
  throw std::runtime_error(name + " is " + seen + "; needs " + needed);
}

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

void require_device(const char* name, const Tensor& tensor, int device) {
  const auto text = [](int i) { return i < 0 ? "cpu" : "cuda:" + std::to_string(i); };
  const int seen = device_of(name, tensor);
  if (seen != device) refuse(name, "on " + text(seen), text(device) + " as the other tensors");
}

Where where_is(const char* name, const Tensor& tensor) {
  Where out{device_of(name, tensor), nullptr};
  if (out.device < 0) return out;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(out.device, &out.stream));
  return out;
}

View::View(const Tensor& tensor) {
  const auto sizes = tensor.sizes();
  data = tensor.data_ptr();
  rank = static_cast<int>(sizes.size());
  size = sizes.data();
  stride = tensor.strides().data();
}

int64_t View::elements() const {
  int64_t n = 1;
  for (int i = 0; i < rank; ++i) n *= size[i];
  return n;
}

std::string shape_text(int rank, const int64_t* size) {
  std::string out = "[";
  for (int i = 0; i < rank; ++i) out += (i ? ", " : "") + std::to_string(size[i]);
  return out + "]";
}

std::string shape_text(const View& view) { return shape_text(view.rank, view.size); }

namespace {

struct DtypeRow {
  int32_t tea, torch;
  const char* name;
};
const DtypeRow kDtypes[] = {
    {TEA_FP16, aoti_torch_dtype_float16(), "float16"},
    {TEA_BF16, aoti_torch_dtype_bfloat16(), "bfloat16"},
    {TEA_FP32, aoti_torch_dtype_float32(), "float32"},
    {TEA_FP64, aoti_torch_dtype_float64(), "float64"},
    {TEA_E4M3, aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn"},
    {TEA_E5M2, aoti_torch_dtype_float8_e5m2(), "float8_e5m2"},
    {TEA_DTYPE_DEFAULT, aoti_torch_dtype_int32(), "int32"},
    {TEA_DTYPE_DEFAULT, aoti_torch_dtype_int64(), "int64"},
    {TEA_DTYPE_DEFAULT, aoti_torch_dtype_uint8(), "uint8"},
    {TEA_DTYPE_DEFAULT, aoti_torch_dtype_bool(), "bool"},
};

const char* name_of(int32_t torch) {
  for (const DtypeRow& row : kDtypes)
    if (row.torch == torch) return row.name;
  return "of another kind";
}

int32_t raw_dtype(const Tensor& tensor) {
  int32_t out;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &out));
  return out;
}

}  // namespace

int32_t dtype_of(const Tensor& tensor) {
  const int32_t dtype = raw_dtype(tensor);
  for (const DtypeRow& row : kDtypes)
    if (row.torch == dtype) return row.tea;
  return TEA_DTYPE_DEFAULT;
}

std::string dtype_text(const Tensor& tensor) { return name_of(raw_dtype(tensor)); }
std::string dtype_text(int32_t dtype) { return name_of(torch_dtype(dtype)); }

int32_t dtype_named(const char* argument, const std::string& name) {
  for (const DtypeRow& row : kDtypes)
    if (name == row.name && row.tea) return row.tea;
  refuse(argument, "\"" + name + "\"", "a floating-point dtype, as in \"float8_e4m3fn\"");
}

int32_t torch_dtype(int32_t dtype) {
  for (const DtypeRow& row : kDtypes)
    if (row.tea == dtype && dtype) return row.torch;
  refuse("dtype", std::to_string(dtype), "a type of te_attention.h");
}

int32_t torch_int32() { return aoti_torch_dtype_int32(); }
int32_t torch_int64() { return aoti_torch_dtype_int64(); }
int32_t torch_bool() { return aoti_torch_dtype_bool(); }
int32_t torch_byte() { return aoti_torch_dtype_uint8(); }

Tensor empty(const Tensor& like, int32_t dtype, int rank, const int64_t* size,
             const int64_t* stride) {
  int64_t contiguous[8];
  if (!stride) {
    int64_t step = 1;
    for (int i = rank - 1; i >= 0; --i) {
      contiguous[i] = step;
      step *= size[i] > 1 ? size[i] : 1;
    }
    stride = contiguous;
  }
  int32_t type, index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &index));
  AtenTensorHandle out;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(rank, size, stride, dtype, type, index, &out));
  return Tensor(out);
}

Tensor empty(const Tensor& like, int32_t dtype, std::initializer_list<int64_t> size) {
  return empty(like, dtype, static_cast<int>(size.size()), size.begin());
}

Tensor empty_contiguous_like(const Tensor& like) {
  const View view(like);
  return empty(like, raw_dtype(like), view.rank, view.size);
}

namespace {

// Whether the elements fill their memory, in whatever order of dimensions.
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

}  // namespace

Tensor new_like(const Tensor& like) {
  const View view(like);
  // PyTorch's own way leads through its dispatcher, which looks operators up by name.
  if (!is_dense(view)) return torch::stable::empty_like(like);
  return empty(like, raw_dtype(like), view.rank, view.size, view.stride);
}

void* Place::memory(const char* name, const Tensor& tensor) const {
  require_device(name, tensor, where.device);
  if (!tensor.is_contiguous())
    refuse(name, "not contiguous", "a contiguous tensor (call .contiguous())");
  return tensor.data_ptr();
}

void* Place::memory(const char* name, const Tensor& tensor, int32_t dtype) const {
  if (raw_dtype(tensor) != dtype)
    refuse(std::string(name) + ".dtype", name_of(raw_dtype(tensor)), name_of(dtype));
  return memory(name, tensor);
}

}  // namespace tea::torch_ops
