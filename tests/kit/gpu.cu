// Gpu, by CUDA's runtime; unmapped address ranges by its driver.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <thread>
#include <vector>

#include "kit/gpu.h"

namespace tea::kit {
namespace {

constexpr auto kPatience = std::chrono::seconds(30);
constexpr size_t kLeastBlock = size_t{16} << 20;  // most cases; allocating may take milliseconds

void require(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  throw GpuLost(std::string(what) + ": " + cudaGetErrorName(code) + ", " +
                cudaGetErrorString(code));
}

// The driver's entry, through the runtime: nothing links libcuda.
template <class Function>
Function driver_entry(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  require(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found), name);
  if (found != cudaDriverEntryPointSuccess) throw GpuLost(std::string(name) + " is missing");
  return reinterpret_cast<Function>(entry);
}
#define TEA_DRIVER(name) driver_entry<decltype(&name)>(#name)

void require_driver(CUresult code, const char* what) {
  if (code != CUDA_SUCCESS) throw GpuLost(std::string(what) + ": error " + std::to_string(code));
}

// Physical memory with an address range on both sides that is reserved and never mapped.
struct Island {
  CUdeviceptr begin = 0;
  size_t size = 0;
};

Island make_island(int device, size_t bytes) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  size_t granule = 0;
  require_driver(TEA_DRIVER(cuMemGetAllocationGranularity)(&granule, &properties,
                                                           CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                 "granularity");
  const size_t size = (std::max<size_t>(bytes, 1) + granule - 1) / granule * granule;
  CUmemGenericAllocationHandle memory;
  CUdeviceptr range;
  require_driver(TEA_DRIVER(cuMemCreate)(&memory, size, &properties, 0), "cuMemCreate");
  require_driver(TEA_DRIVER(cuMemAddressReserve)(&range, size + 2 * granule, 0, 0, 0), "reserve");
  require_driver(TEA_DRIVER(cuMemMap)(range + granule, size, 0, memory, 0), "cuMemMap");
  const CUmemAccessDesc access = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  require_driver(TEA_DRIVER(cuMemSetAccess)(range + granule, size, &access, 1), "access");
  return {range + granule, size};
}

__global__ void fill_words(uint32_t* to, uint32_t word, size_t count) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) to[i] = word;
}

}  // namespace

struct Gpu::State {
  int device;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  Block block{};
  uint8_t* scratch = nullptr;
  size_t block_bytes = 0, scratch_bytes = 0;
  std::map<std::pair<size_t, size_t>, Island> islands;  // by slot and size
  std::vector<void*> separate;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replayed = nullptr;
};

Gpu::Gpu(int device) : state_(std::make_unique<State>()) {
  state_->device = device;
  require(cudaSetDevice(device), "cudaSetDevice");
  require(cudaStreamCreateWithFlags(&state_->stream, cudaStreamNonBlocking), "stream");
  require(cudaEventCreate(&state_->begin), "event");
  require(cudaEventCreate(&state_->end), "event");
}

// The process ends soon after its threads: what is mapped stays until then.
Gpu::~Gpu() {
  cudaFreeHost(state_->block.host);
  cudaFree(state_->block.device);
  cudaFree(state_->scratch);
  if (state_->replayed) cudaGraphExecDestroy(state_->replayed);
  if (state_->graph) cudaGraphDestroy(state_->graph);
  cudaStreamDestroy(state_->stream);
}

void* Gpu::stream() const { return state_->stream; }

Gpu::Block Gpu::block(size_t bytes) {
  if (bytes <= state_->block_bytes) return state_->block;
  wait();
  require(cudaFreeHost(state_->block.host), "free");
  require(cudaFree(state_->block.device), "free");
  const size_t size = std::max(2 * bytes, kLeastBlock);
  state_->block_bytes = size;
  require(cudaMallocHost(&state_->block.host, size), "pinned memory");
  require(cudaMalloc(&state_->block.device, size), "memory");
  return state_->block;
}

uint8_t* Gpu::scratch(size_t bytes) {
  if (bytes <= state_->scratch_bytes) return state_->scratch;
  wait();
  require(cudaFree(state_->scratch), "free");
  state_->scratch_bytes = 2 * bytes;
  require(cudaMalloc(&state_->scratch, 2 * bytes), "memory");
  return state_->scratch;
}

uint8_t* Gpu::guarded(size_t slot, size_t bytes, size_t alignment, Flush flush) {
  constexpr size_t kSmall = size_t{2} << 20;
  size_t size = kSmall;
  while (size < bytes) size *= 2;
  Island& island = state_->islands[{slot, size}];
  if (!island.size) island = make_island(state_->device, size);
  const CUdeviceptr end = island.begin + island.size - bytes;
  return reinterpret_cast<uint8_t*>(flush == Flush::kStart ? island.begin : end - end % alignment);
}

uint8_t* Gpu::separate(size_t bytes) {
  void* p = nullptr;
  require(cudaMalloc(&p, std::max<size_t>(bytes, 1)), "memory");
  state_->separate.push_back(p);
  return static_cast<uint8_t*>(p);
}

void Gpu::release() {
  wait();
  for (void* p : state_->separate) require(cudaFree(p), "free");
  state_->separate.clear();
}

void Gpu::upload(uint8_t* to, const uint8_t* from, size_t bytes) {
  if (!bytes) return;
  require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, state_->stream), "upload");
}

void Gpu::download(uint8_t* to, const uint8_t* from, size_t bytes) {
  if (!bytes) return;
  require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, state_->stream), "download");
}

void Gpu::fill(uint8_t* to, uint32_t word, size_t bytes) {
  const size_t count = (bytes + 3) / 4;
  if (!count) return;
  const auto blocks = static_cast<unsigned>(std::min<size_t>((count + 255) / 256, 1024));
  fill_words<<<blocks, 256, 0, state_->stream>>>(reinterpret_cast<uint32_t*>(to), word, count);
  require(cudaGetLastError(), "fill");
}

void Gpu::wait() {
  const auto start = std::chrono::steady_clock::now();
  for (;;) {
    const cudaError_t code = cudaStreamQuery(state_->stream);
    if (code == cudaSuccess) return;
    if (code != cudaErrorNotReady) require(code, "the GPU");
    if (std::chrono::steady_clock::now() - start > kPatience)
      throw GpuLost("the GPU did not end the work");
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

void Gpu::begin_capture() {
  if (state_->replayed) cudaGraphExecDestroy(state_->replayed);
  if (state_->graph) cudaGraphDestroy(state_->graph);
  state_->replayed = nullptr, state_->graph = nullptr;
  require(cudaStreamBeginCapture(state_->stream, cudaStreamCaptureModeGlobal), "begin of capture");
}

void Gpu::end_capture() {
  require(cudaStreamEndCapture(state_->stream, &state_->graph), "end of capture");
  require(cudaGraphInstantiate(&state_->replayed, state_->graph, 0), "instantiation");
}

void Gpu::replay() { require(cudaGraphLaunch(state_->replayed, state_->stream), "replay"); }

void Gpu::start_clock() { require(cudaEventRecord(state_->begin, state_->stream), "clock"); }

double Gpu::stop_clock() {
  require(cudaEventRecord(state_->end, state_->stream), "clock");
  wait();
  float milliseconds = 0;
  require(cudaEventElapsedTime(&milliseconds, state_->begin, state_->end), "clock");
  return milliseconds;
}

Gpu& gpu_of_thread(int device) {
  thread_local std::map<int, std::unique_ptr<Gpu>> gpus;
  std::unique_ptr<Gpu>& gpu = gpus[device];
  if (!gpu) gpu = std::make_unique<Gpu>(device);
  return *gpu;
}

int gpu_count() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

}  // namespace tea::kit
