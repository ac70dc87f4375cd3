// Gpu in a build without device code.
#include "kit/gpu.h"

namespace tea::kit {

struct Gpu::State {};
Gpu::Gpu(int) { throw std::runtime_error("this build has no device code (TE_ATTENTION_CUDA=OFF)"); }
Gpu::~Gpu() = default;
void* Gpu::stream() const { return nullptr; }
Gpu::Block Gpu::block(size_t) { return {}; }
uint8_t* Gpu::scratch(size_t) { return nullptr; }
uint8_t* Gpu::guarded(size_t, size_t, size_t, Flush) { return nullptr; }
uint8_t* Gpu::separate(size_t) { return nullptr; }
void Gpu::release() {}
void Gpu::upload(uint8_t*, const uint8_t*, size_t) {}
void Gpu::download(uint8_t*, const uint8_t*, size_t) {}
void Gpu::fill(uint8_t*, uint32_t, size_t) {}
void Gpu::wait() {}
void Gpu::begin_capture() {}
void Gpu::end_capture() {}
void Gpu::replay() {}
void Gpu::start_clock() {}
double Gpu::stop_clock() { return 0; }
Gpu& gpu_of_thread(int device) {
  thread_local Gpu gpu(device);
  return gpu;
}
int gpu_count() { return 0; }

}  // namespace tea::kit
