// Filling and copying memory on the host or on a device.
#include "nvte/memory.h"

#include <cstring>

#include "core/driver.h"
#include "nvte/boundary.h"
#include "nvte/tensor.h"

namespace tea::nvte {

int device_of(const void* pointer) { return driver::device_of(pointer); }

void MemorySide::add(std::string_view name, const void* data) {
  if (!data) return;
  if (known_.holds(data)) return;  // tensors often share an allocation
  const driver::Allocation found = driver::allocation_of(data);
  const int device = found.device;
  if (first_.empty()) first_ = name, device_ = device;
  known_ = found;
  TEA_REQUIRE(device == device_, std::string(name) + " on device", device,
              "the device of " + std::string(first_) + ", " + shown(device_));
}

void fill(void* pointer, unsigned char value, size_t bytes, cudaStream_t stream) {
  const int device = device_of(pointer);
  if (device == kHost) {
    std::memset(pointer, value, bytes);
    return;
  }
  const driver::OnDevice here(device);
  driver::fill(pointer, value, bytes, stream);
}

void copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  MemorySide side;
  side.add("the target", to);
  side.add("the source", from);
  const int device = side.device();
  if (device == kHost) {
    std::memcpy(to, from, bytes);
    return;
  }
  const driver::OnDevice here(device);
  driver::copy(to, from, bytes, stream);
}

}  // namespace tea::nvte

void nvte_zero_tensor(const NVTETensor tensor, cudaStream_t stream) {
  if (tensor == nullptr) return;
  TEA_NVTE_EXPORTED({
    const tea::nvte::Tensor& target = tea::nvte::tensor(tensor);
    for (const NVTEBasicTensor* part : {&target.data, &target.amax}) {
      const size_t bytes = tea::nvte::numel(part->shape) * tea::nvte::bits_of(part->dtype) / 8;
      if (part->data_ptr != nullptr && bytes > 0) tea::nvte::fill(part->data_ptr, 0, bytes, stream);
    }
  });
}

void nvte_memset(void* ptr, int value, size_t size_in_bytes, cudaStream_t stream) {
  TEA_NVTE_CHECK(ptr != nullptr, "ptr is NULL; needs memory of ", size_in_bytes, " bytes.");
  TEA_NVTE_EXPORTED({
    if (size_in_bytes > 0)
      tea::nvte::fill(ptr, static_cast<unsigned char>(value), size_in_bytes, stream);
  });
}
