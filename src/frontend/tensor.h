// A tensor of any framework, and the checks that all front ends share. No type of a framework
// appears in this layer.
#pragma once
#include <cstdint>
#include <string>

#include "te_attention.h"

namespace tea::frontend {

// A struct of the C API: its size, and zero otherwise.
template <class Struct>
Struct sized() {
  Struct out{};
  out.struct_size = sizeof out;
  return out;
}

// Element types beyond tea_dtype.
enum : int32_t { kInt32 = 100, kInt64, kUint8, kBool, kOtherType };
std::string type_text(int32_t type);          // as frameworks print it: "float16"
int32_t type_named(const std::string& name);  // the opposite; kOtherType if there is none
int type_bytes(int32_t type);                 // of an element; 1 for other types
inline bool is_fp8(int32_t type) { return type == TEA_E4M3 || type == TEA_E5M2; }
// The tea_dtype of that name; refuses `argument` if there is none.
int32_t dtype_named(const char* argument, const std::string& name);

// A tensor's memory, type, place and shape. `size` and `stride` point into the framework's tensor.
struct Tensor {
  void* data = nullptr;
  int32_t type = kOtherType;
  int device = -1;  // -1: the host
  int rank = 0;
  const int64_t* size = nullptr;
  const int64_t* stride = nullptr;  // in elements

  int64_t elements() const;
  bool is_contiguous() const;
};

// A shape of at most four dimensions.
struct Shape {
  int rank;
  int64_t size[4];
};

std::string shape_text(int rank, const int64_t* size);
std::string shape_text(const Tensor& tensor);

// Throws std::runtime_error: the argument's name, the value seen, the value needed.
[[noreturn]] void refuse(const std::string& name, const std::string& seen,
                         const std::string& needed);
// Refuses a tensor whose strides are all zero: in the C API those mean the default.
[[noreturn]] void refuse_expanded(const std::string& name);
// `meaning` precedes the shape that is needed.
void require_shape(const char* name, const Tensor& tensor, const Shape& needed,
                   const char* meaning = "");
// The number of scales of keys or values in FP8: one, or one for each head. `others`: that of the
// scales on the other side, which must be the same; 0: there are none.
int64_t require_cache_scales(const char* name, const Tensor& scales, int64_t heads, int64_t others);
void require_device(const char* name, const Tensor& tensor, int device);
// The memory of a contiguous tensor of that type on that device.
void* require_memory(const char* name, const Tensor& tensor, int32_t type, int device);

}  // namespace tea::frontend
