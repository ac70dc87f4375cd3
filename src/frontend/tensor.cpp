#include "frontend/tensor.h"

#include <algorithm>
#include <stdexcept>

namespace tea::frontend {
namespace {

struct TypeName {
  int32_t type;
  const char* name;
  int bytes;
};
constexpr TypeName kTypeNames[] = {
    {TEA_FP16, "float16", 2}, {TEA_BF16, "bfloat16", 2},      {TEA_FP32, "float32", 4},
    {TEA_FP64, "float64", 8}, {TEA_E4M3, "float8_e4m3fn", 1}, {TEA_E5M2, "float8_e5m2", 1},
    {kInt32, "int32", 4},     {kInt64, "int64", 8},           {kUint8, "uint8", 1},
    {kBool, "bool", 1},
};

}  // namespace

std::string type_text(int32_t type) {
  for (const TypeName& row : kTypeNames)
    if (row.type == type) return row.name;
  return "of another kind";
}

int type_bytes(int32_t type) {
  for (const TypeName& row : kTypeNames)
    if (row.type == type) return row.bytes;
  return 1;
}

int32_t type_named(const std::string& name) {
  for (const TypeName& row : kTypeNames)
    if (name == row.name) return row.type;
  return kOtherType;
}

int32_t dtype_named(const char* argument, const std::string& name) {
  if (const int32_t type = type_named(name); type < kInt32) return type;
  refuse(argument, "\"" + name + "\"", "a floating-point dtype, as in \"float8_e4m3fn\"");
}

int64_t Tensor::elements() const {
  int64_t n = 1;
  for (int i = 0; i < rank; ++i) n *= size[i];
  return n;
}

bool Tensor::is_contiguous() const {
  if (elements() == 0) return true;
  int64_t step = 1;
  for (int i = rank - 1; i >= 0; --i) {
    if (size[i] > 1 && stride[i] != step) return false;
    step *= size[i];
  }
  return true;
}

std::string shape_text(int rank, const int64_t* size) {
  std::string out = "[";
  for (int i = 0; i < rank; ++i) out += (i ? ", " : "") + std::to_string(size[i]);
  return out + "]";
}

std::string shape_text(const Tensor& tensor) { return shape_text(tensor.rank, tensor.size); }

void refuse(const std::string& name, const std::string& seen, const std::string& needed) {
  throw std::runtime_error(name + " is " + seen + "; needs " + needed);
}

void refuse_expanded(const std::string& name) {
  refuse(name, "expanded in every dimension", "memory of its own (call .contiguous())");
}

void require_shape(const char* name, const Tensor& tensor, const Shape& needed,
                   const char* meaning) {
  if (tensor.rank != needed.rank ||
      !std::equal(tensor.size, tensor.size + tensor.rank, needed.size))
    refuse(name, "of shape " + shape_text(tensor), meaning + shape_text(needed.rank, needed.size));
}

int64_t require_cache_scales(const char* name, const Tensor& scales, int64_t heads,
                             int64_t others) {
  const int64_t n = scales.elements();
  if (n != 1 && n != heads)
    refuse(name, "of shape " + shape_text(scales),
           "float32 [1], or [heads] with " + std::to_string(heads) + " heads of k and v");
  if (others && n != others)
    refuse(name, "of shape " + shape_text(scales), "the shape of k_descale");
  return n;
}

void require_device(const char* name, const Tensor& tensor, int device) {
  const auto text = [](int i) { return i < 0 ? "cpu" : "cuda:" + std::to_string(i); };
  if (tensor.device != device)
    refuse(name, "on " + text(tensor.device), text(device) + " as the other tensors");
}

void* require_memory(const char* name, const Tensor& tensor, int32_t type, int device) {
  if (tensor.type != type)
    refuse(std::string(name) + ".dtype", type_text(tensor.type), type_text(type));
  require_device(name, tensor, device);
  if (!tensor.is_contiguous())
    refuse(name, "not contiguous", "a contiguous tensor (call .contiguous())");
  return tensor.data;
}

}  // namespace tea::frontend
