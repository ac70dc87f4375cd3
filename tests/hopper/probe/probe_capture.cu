// Does the first launch of a kernel work inside a stream capture, though its code may have to be
// loaded there? Run with CUDA_MODULE_LOADING unset, LAZY and EAGER.
#include <cuda.h>
#include <dlfcn.h>

#include "hopper/probe/probe.h"

namespace tea::probe {
namespace {

template <int kWhich>
__global__ void write(int* out, int value) {
  extern __shared__ int shared[];
  shared[threadIdx.x] = value + kWhich;
  __syncthreads();
  if (threadIdx.x == 0) *out = shared[31];
}

int* result_word() {
  int* p;
  must(cudaMalloc(&p, 4), "allocation");
  return p;
}

// Ends the capture, runs the graph once and tells whether it did the work.
bool replays(cudaStream_t stream, const int* word, int want) {
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t run = nullptr;
  int got = -1;
  if (cudaStreamEndCapture(stream, &graph) != cudaSuccess || !graph) return false;
  if (cudaGraphInstantiate(&run, graph, 0) != cudaSuccess) return false;
  if (cudaGraphLaunch(run, stream) != cudaSuccess) return false;
  if (cudaStreamSynchronize(stream) != cudaSuccess) return false;
  must(cudaMemcpy(&got, word, 4, cudaMemcpyDeviceToHost), "copy");
  return got == want;
}

template <int kWhich>
void capture(const char* fact, cudaStreamCaptureMode mode, int shared, bool attributes_inside) {
  static int* const word = result_word();
  cudaStream_t stream;
  must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  must(cudaMemset(word, 0, 4), "clear");
  must(cudaDeviceSynchronize(), "synchronize");
  must(cudaStreamBeginCapture(stream, mode), "begin capture");
  cudaError_t set = cudaSuccess;
  const double start = now_ns();
  if (attributes_inside) {
    cudaFuncAttributes attributes;
    set = cudaFuncGetAttributes(&attributes, write<kWhich>);
    if (set == cudaSuccess)
      set =
          cudaFuncSetAttribute(write<kWhich>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  }
  write<kWhich><<<1, 32, shared, stream>>>(word, 100);
  const cudaError_t launched = cudaGetLastError();
  const double took = now_ns() - start;
  const bool good = replays(stream, word, 100 + kWhich);
  report(fact, good && set == cudaSuccess && launched == cudaSuccess,
         words("attributes", cudaGetErrorName(set)) + words("launch", cudaGetErrorName(launched)) +
             figure("us", took / 1000));
  cudaGetLastError();
}

}  // namespace

void capture_first() {
  capture<1>("first launch inside a capture, global mode", cudaStreamCaptureModeGlobal, 128, false);
  capture<2>("first launch inside a capture, thread-local mode", cudaStreamCaptureModeThreadLocal,
             128, false);
  capture<3>("first launch inside a capture, relaxed mode", cudaStreamCaptureModeRelaxed, 128,
             false);
}

void capture_attributes() {
  capture<4>("attributes read and set inside a capture, 200 KB shared", cudaStreamCaptureModeGlobal,
             200 << 10, true);
}

// As when a framework made the context and began the capture with another copy of the runtime.
void capture_driver_first() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  if (!driver) return report("libcuda.so.1 loads", false);
  const auto entry = [&](const char* name) { return dlsym(driver, name); };
#define DRIVER(name) reinterpret_cast<decltype(&name)>(entry(#name))
#define DRIVER_V2(name) reinterpret_cast<decltype(&name)>(entry(#name "_v2"))
  CUdevice device;
  CUcontext context;
  CUstream stream;
  CUdeviceptr word;
  bool ok = DRIVER(cuInit)(0) == CUDA_SUCCESS && DRIVER(cuDeviceGet)(&device, 0) == CUDA_SUCCESS;
  ok = ok && DRIVER(cuDevicePrimaryCtxRetain)(&context, device) == CUDA_SUCCESS;
  ok = ok && DRIVER(cuCtxSetCurrent)(context) == CUDA_SUCCESS;
  ok = ok && DRIVER(cuStreamCreate)(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS;
  ok = ok && DRIVER_V2(cuMemAlloc)(&word, 4) == CUDA_SUCCESS;
  ok = ok && DRIVER_V2(cuStreamBeginCapture)(stream, CU_STREAM_CAPTURE_MODE_GLOBAL) == CUDA_SUCCESS;
#undef DRIVER
#undef DRIVER_V2
  if (!ok) return report("the driver begins a capture", false);
  const double start = now_ns();
  const cudaError_t set =
      cudaFuncSetAttribute(write<5>, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10);
  write<5><<<1, 32, 200 << 10, stream>>>(reinterpret_cast<int*>(word), 100);
  const cudaError_t launched = cudaGetLastError();
  const double took = now_ns() - start;
  report("first runtime call of the process inside a capture",
         replays(stream, reinterpret_cast<int*>(word), 105),
         words("attributes", cudaGetErrorName(set)) + words("launch", cudaGetErrorName(launched)) +
             figure("us", took / 1000));
}

}  // namespace tea::probe
