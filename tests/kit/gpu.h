// One thread's place on a GPU: a stream, memory that grows, and copies to and fro. In a build
// without device code every Gpu throws.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "kit/guarded.h"

namespace tea::kit {

// The GPU does not answer any more: nothing else can run in this process.
struct GpuLost : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Gpu {
 public:
  explicit Gpu(int device);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  void* stream() const;
  // Equally many bytes on both sides; valid, like scratch(), until more is asked for. Both begin on
  // a multiple of 512.
  struct Block {
    uint8_t *host, *device;
  };
  Block block(size_t bytes);
  uint8_t* scratch(size_t bytes);
  // Memory whose first or last byte is adjacent to an unmapped address range, so that
  // an access beyond it faults. One piece for each `slot`, in the same place whenever it is asked
  // for with the same sizes. `alignment`: of the first byte; leaves less than that between the last
  // byte and the border.
  uint8_t* guarded(size_t slot, size_t bytes, size_t alignment, Flush flush);
  // An allocation of its own, of exactly these bytes, until release() frees them all.
  uint8_t* separate(size_t bytes);
  void release();

  // In the order of the stream.
  void upload(uint8_t* to, const uint8_t* from, size_t bytes);
  void download(uint8_t* to, const uint8_t* from, size_t bytes);
  void fill(uint8_t* to, uint32_t word, size_t bytes);  // bytes: rounded up to a multiple of 4
  // Waits for the stream. Throws GpuLost if something failed there, or did not end in half a
  // minute.
  void wait();

  // The work on the stream between the two calls becomes a graph, which replay() runs.
  void begin_capture();
  void end_capture();
  void replay();
  // Milliseconds between two points of the stream.
  void start_clock();
  double stop_clock();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The Gpu of this thread.
Gpu& gpu_of_thread(int device);
// Makes the GPUs visible that CUDA finds; 0 in a build without device code.
int gpu_count();

}  // namespace tea::kit
