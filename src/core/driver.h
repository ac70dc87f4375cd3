// The CUDA driver, loaded at run time and asked a few questions. No header of CUDA is read and
// nothing of CUDA is linked, so that the library loads and runs its CPU engines where no driver
// exists.
#pragma once
#include <cstddef>
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

// The index of the device whose memory `pointer` is in, managed memory included; kHost for any
// other pointer. Asks nothing where this process has not used the driver yet: it has no such memory
// then.
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
