// Arguments of the supporting operations: import of the struct, checks of sizes, pointers, dtypes
// and strides, and the device.
#pragma once
#include <initializer_list>

#include "core/device.h"
#include "core/error.h"
#include "math/divide.h"
#include "math/host_device.h"
#include "te_attention_ops.h"

namespace tea {

// The device and stream of an operation. On the host the stream is not read.
struct Place {
  int device = kHost;
  void* stream = nullptr;
};

// Throws unless this build can run on the device. Without device code it therefore returns true.
bool is_host(const Place& place);
#if defined(TE_ATTENTION_CUDA)
inline constexpr bool kGpuCode = true;
#else
inline constexpr bool kGpuCode = false;
#endif

struct NamedSize {
  const char* name;
  int64_t value;
};
// Each must be at least 0. Returns the product, and refuses it if sizes in bytes could overflow.
int64_t require_sizes(std::initializer_list<NamedSize> sizes);

// A pointer to elements, which must be aligned to their size.
struct NamedPointer {
  template <class T>
  NamedPointer(const char* n, const T* p) : name(n), value(p), bytes(sizeof(T)) {}
  NamedPointer(const char* n, const void* p, int element_bytes)
      : name(n), value(p), bytes(static_cast<size_t>(element_bytes)) {}

  const char* name;
  const void* value;
  size_t bytes;
};
void require_pointers(std::initializer_list<NamedPointer> pointers);
void require_flag(const char* name, int32_t value);      // 0 or 1
void require_reserved(const char* name, int32_t value);  // 0

// Sets of dtypes, bit n for dtype n.
inline constexpr uint32_t kRealDtypes =
    1u << TEA_FP16 | 1u << TEA_BF16 | 1u << TEA_FP32 | 1u << TEA_FP64;
inline constexpr uint32_t kFp8Dtypes = 1u << TEA_E4M3 | 1u << TEA_E5M2;
inline constexpr uint32_t kAnyDtype = kRealDtypes | kFp8Dtypes;
void require_dtype(const char* name, int32_t value, uint32_t allowed);

// The caller's strides, or those of contiguous [batch, seq, heads, dim].
tea_strides strides_or_contiguous(const char* name, const tea_strides& given, int64_t seq,
                                  int64_t heads, int64_t dim);

TEA_HOST_DEVICE void report(int32_t* status, int32_t bit) {
  if (!status) return;
#if defined(__CUDA_ARCH__)
  atomicOr(status, bit);
#else
  *status |= bit;
#endif
}

}  // namespace tea
