// The CUDA driver, loaded at run time. No header of CUDA is included and no library of CUDA is
// linked, so that the library loads and runs its CPU engines without a driver.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/device.h"

namespace tea::driver {

struct Gpus {
  std::vector<Device> list;
  std::string why_none;  // why the list is empty
};
// Loads and initialises the driver once per process.
const Gpus& gpus();

// The device of this thread's context; without a context the first device, as in CUDA's runtime;
// kHost without a GPU.
int current_device();

// The device that CUDA's runtime uses for this thread, if this process uses GPUs: that of its
// context, or the first device if only other threads have a context. kHost if no thread has one:
// then there is no device memory. It does not initialise the driver.
int device_in_use();

// An allocation of device memory; 0 bytes for other memory.
struct Allocation {
  int device = kHost;
  uintptr_t begin = 0;
  size_t bytes = 0;
  bool holds(const void* pointer) const {
    return reinterpret_cast<uintptr_t>(pointer) - begin < bytes;
  }
};

// The allocation that contains `pointer`, including managed memory. It takes one call of the
// driver, and none if this process has not used the driver, which implies host memory.
Allocation allocation_of(const void* pointer);
// The index of the device that owns `pointer`, or kHost.
int device_of(const void* pointer);

// Ordered on `stream`, on the current device; see OnDevice.
void fill(void* pointer, unsigned char value, size_t bytes, void* stream);
void copy(void* to, const void* from, size_t bytes, void* stream);

// Whether a CUDA graph is being captured on `stream`.
bool is_capturing(void* stream);

// In its scope this thread may load modules and allocate memory while any thread captures a CUDA
// graph; these calls do not become part of the graph.
class OutsideCapture {
 public:
  OutsideCapture();
  ~OutsideCapture();
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  int mode_;  // the previous mode
};

// In its scope the CUDA context of this thread belongs to `device`: the current context if it does,
// else the device's primary context, which CUDA's runtime and the frameworks use.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  bool pushed_ = false;
};

}  // namespace tea::driver
