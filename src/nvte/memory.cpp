// Filling and copying memory, on the side where it lies.
#include "nvte/memory.h"

#include <cstring>

#include "core/device.h"
#include "nvte/tensor.h"

namespace tea::nvte {

int device_of(const void*) { return kHost; }

void fill(void* pointer, unsigned char value, size_t bytes, cudaStream_t) {
  std::memset(pointer, value, bytes);
}

void copy(void* to, const void* from, size_t bytes, cudaStream_t) { std::memcpy(to, from, bytes); }

}  // namespace tea::nvte

void nvte_zero_tensor(const NVTETensor tensor, cudaStream_t stream) {
  if (tensor == nullptr) return;
  const tea::nvte::Tensor& target = tea::nvte::tensor(tensor);
  for (const NVTEBasicTensor* part : {&target.data, &target.amax}) {
    const size_t bytes = tea::nvte::numel(part->shape) * tea::nvte::bits_of(part->dtype) / 8;
    if (part->data_ptr != nullptr && bytes > 0) tea::nvte::fill(part->data_ptr, 0, bytes, stream);
  }
}

void nvte_memset(void* ptr, int value, size_t size_in_bytes, cudaStream_t stream) {
  TEA_NVTE_CHECK(ptr != nullptr, "ptr is NULL; needs memory of ", size_in_bytes, " bytes.");
  if (size_in_bytes > 0)
    tea::nvte::fill(ptr, static_cast<unsigned char>(value), size_in_bytes, stream);
}
