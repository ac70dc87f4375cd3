// Location of memory, fills and copies. Only this file distinguishes host from device memory, so
// that the rest of the TransformerEngine C API does not depend on it.
#pragma once
#include <cstddef>
#include <string_view>

#include "core/driver.h"
#include "transformer_engine/transformer_engine.h"

namespace tea::nvte {

// The index of the device that owns `pointer` (also managed memory), or tea::kHost.
int device_of(const void* pointer);

// Checks that all memory of a call is on one device or on the host: that of the first pointer.
class MemorySide {
 public:
  // NULL is ignored. Throws if `data` is not on the side of the previous pointers.
  void add(std::string_view name, const void* data);
  int device() const { return device_; }

 private:
  int device_ = kHost;
  std::string_view first_;
  driver::Allocation known_;  // the last allocation
};

// Fills `bytes` > 0 bytes with `value`, ordered on `stream`; on the host, immediately.
void fill(void* pointer, unsigned char value, size_t bytes, cudaStream_t stream);

// Copies `bytes` > 0 bytes on the same side, ordered on `stream`; on the host, immediately.
void copy(void* to, const void* from, size_t bytes, cudaStream_t stream);

}  // namespace tea::nvte
