// The CUDA driver, loaded at run time and asked a few questions. No header of CUDA is read and
// nothing of CUDA is linked, so that the library loads and runs its CPU engines where no driver
// exists.
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

// The device of this thread's context; the first one, as for CUDA's runtime, where there is no
// context yet; kHost without a GPU.
int current_device();

// The device that CUDA's runtime has for this thread, if this process uses GPUs: that of its
// context, or the first one where only other threads have one. kHost where nobody has: there is no
// memory of a GPU then. Starts nothing.
int device_in_use();

// A device's memory that was allocated at once; of other memory nothing is known: no bytes.
struct Allocation {
  int device = kHost;
  uintptr_t begin = 0;
  size_t bytes = 0;
  bool holds(const void* pointer) const {
    return reinterpret_cast<uintptr_t>(pointer) - begin < bytes;
  }
};

// Where `pointer` lies, managed memory included. One call of the driver; none where this process
// has not used it yet: it has no such memory then.
Allocation allocation_of(const void* pointer);
// The index of the device whose memory it is, or kHost.
int device_of(const void* pointer);

// In the order of `stream`, on the device that is current; see OnDevice.
void fill(void* pointer, unsigned char value, size_t bytes, void* stream);
void copy(void* to, const void* from, size_t bytes, void* stream);

// Whether a CUDA graph is being captured on `stream`.
bool is_capturing(void* stream);

// Within its scope this thread may load and allocate although a CUDA graph is being captured, on
// any thread: none of that joins the graph.
class OutsideCapture {
 public:
  OutsideCapture();
  ~OutsideCapture();
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  int mode_;  // that of before
};

// Within its scope the CUDA context of this thread is one of `device`: the current one if it is
// that already, else the device's primary context, the one that CUDA's runtime and the frameworks
// use.
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
