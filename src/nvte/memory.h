// Where memory lies, and filling it: the one place that asks, so that the rest of the
// TransformerEngine C API works alike on host and device.
#pragma once
#include <cstddef>
#include <string_view>

#include "core/driver.h"
#include "transformer_engine/transformer_engine.h"

namespace tea::nvte {

// The index of the device whose memory `pointer` is in, managed memory included, or tea::kHost.
int device_of(const void* pointer);

// Where all memory of a call lies: on one side, that of what is named first.
class OneSide {
 public:
  // NULL lies nowhere. Throws if `data` lies elsewhere than what came before.
  void add(std::string_view name, const void* data);
  int device() const { return device_; }

 private:
  int device_ = kHost;
  std::string_view first_;
  driver::Allocation known_;  // the last one
};

// `bytes` > 0 bytes become `value`, in the order of `stream`; on the host, at once.
void fill(void* pointer, unsigned char value, size_t bytes, cudaStream_t stream);

// `bytes` > 0 bytes of `from` go to `to`, on the same side, in the order of `stream`; on the host,
// at once.
void copy(void* to, const void* from, size_t bytes, cudaStream_t stream);

}  // namespace tea::nvte
