// Guard pages: memory mapped by hand with nothing mapped behind it, so that a read past its end
// faults. Tests can put a tensor's last byte at the end of such a mapping.
#include <cuda.h>
#include <dlfcn.h>

#include "hopper/probe/probe.h"
#include "hopper/tensor_map.h"

namespace tea::probe {
namespace {

using namespace tea::hopper;

struct Mapping {
  char* begin;
  size_t size;
};

// One granule, mapped in the middle of an address range of three.
Mapping map_alone() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW);
  const auto entry = [&](const char* name) { return driver ? dlsym(driver, name) : nullptr; };
#define DRIVER(name) reinterpret_cast<decltype(&name)>(entry(#name))
  must(cudaFree(nullptr), "context");
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = 0;
  size_t granule = 0;
  CUmemGenericAllocationHandle handle;
  CUdeviceptr range;
  bool ok = DRIVER(cuMemGetAllocationGranularity)(&granule, &properties,
                                                  CU_MEM_ALLOC_GRANULARITY_MINIMUM) == CUDA_SUCCESS;
  ok = ok && DRIVER(cuMemCreate)(&handle, granule, &properties, 0) == CUDA_SUCCESS;
  ok = ok && DRIVER(cuMemAddressReserve)(&range, 3 * granule, 0, 0, 0) == CUDA_SUCCESS;
  ok = ok && DRIVER(cuMemMap)(range + granule, granule, 0, handle, 0) == CUDA_SUCCESS;
  CUmemAccessDesc access = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  ok = ok && DRIVER(cuMemSetAccess)(range + granule, granule, &access, 1) == CUDA_SUCCESS;
#undef DRIVER
  must(ok ? cudaSuccess : cudaErrorUnknown, "mapping");
  return {reinterpret_cast<char*>(range + granule), granule};
}

__global__ void read_byte(const volatile char* p, int* out) { *out = *p; }

__global__ void read_box(const __grid_constant__ TensorMap map, int row, int* zeros) {
  extern __shared__ __align__(1024) char box[];
  __shared__ Barrier full;
  if (threadIdx.x != 0) return;
  init(full, 1);
  publish_barriers();
  arrive_expecting(full, 8192);
  load(box, map, full, {0, row, 0, 0});
  wait(full, 0);
  *zeros = 0;
  for (int i = 0; i < 8192; ++i) *zeros += box[i] == 0;
}

}  // namespace

void guard_read() {
  const Mapping m = map_alone();
  int* out;
  must(cudaMalloc(&out, 4), "allocation");
  read_byte<<<1, 1>>>(m.begin + m.size - 1, out);
  report("the last byte of a mapping is read", cudaDeviceSynchronize() == cudaSuccess,
         figure("granule", m.size));
  read_byte<<<1, 1>>>(m.begin + m.size, out);
  const cudaError_t code = cudaDeviceSynchronize();
  report("a read one byte past a mapping faults", code == cudaErrorIllegalAddress,
         words("error", cudaGetErrorName(code)));
}

void guard_box() {
  const Mapping m = map_alone();
  must(cudaMemset(m.begin, 1, m.size), "fill");
  int *out, zeros = -1;
  must(cudaMalloc(&out, 4), "allocation");
  const uint64_t rows = 100;  // of 128 bytes, the last at the mapping's end
  TensorMap map;
  const MapShape shape = {Type::kBf16,      Swizzle::k128,          4,
                          {64, rows, 1, 1}, {0, 128, 12800, 12800}, {64, 64, 1, 1}};
  const int code = encode(&map, m.begin + m.size - rows * 128, shape);
  read_box<<<1, 32, 8192>>>(map, 80, out);
  const cudaError_t run = cudaDeviceSynchronize();
  if (run == cudaSuccess) cudaMemcpy(&zeros, out, 4, cudaMemcpyDeviceToHost);
  report("a box past the tensor reads zeros, not the unmapped page", zeros == 44 * 128,
         figure("encode", code) + words("error", cudaGetErrorName(run)) + figure("zeros", zeros));
  MapShape beyond = shape;
  beyond.extent[1] = rows + 64;
  encode(&map, m.begin + m.size - rows * 128, beyond);
  read_box<<<1, 32, 8192>>>(map, 80, out);
  const cudaError_t fault = cudaDeviceSynchronize();
  report("a box of a tensor that claims the unmapped page faults", fault != cudaSuccess,
         words("error", cudaGetErrorName(fault)));
}

}  // namespace tea::probe
