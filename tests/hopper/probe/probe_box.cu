// How far outside a tensor a box may start. What the copy engine refuses ends the process's work on
// the device, so every coordinate is tried in a process of its own.
#include "hopper/apart.h"
#include "hopper/probe/probe.h"
#include "hopper/tensor_map.h"

namespace tea::probe {
namespace {

using namespace tea::hopper;

constexpr int kBoxBytes = 64 * 128;
enum Outcome { kNothing = 10, kOther, kFault };  // apart from what exit() gives otherwise

struct Start {
  int at[4];
};

__global__ void copy_box(const __grid_constant__ TensorMap map, Start start, int* nonzero) {
  extern __shared__ __align__(1024) char box[];
  __shared__ Barrier full;
  if (threadIdx.x != 0) return;
  init(full, 1);
  publish_barriers();
  arrive_expecting(full, kBoxBytes);
  load(box, map, full, start.at);
  wait(full, 0);
  int count = 0;
  for (int i = 0; i < kBoxBytes; ++i) count += box[i] != 0;
  *nonzero = count;
}

// In a child: kNothing if the box came as zeros, kOther if not, kFault if it did not come.
int load_at(const Start& start) {
  char* tensor;
  int* out;
  const size_t size = 2 * 38400;
  must(cudaMalloc(&tensor, size), "allocation");
  must(cudaMalloc(&out, sizeof(int)), "allocation");
  must(cudaMemset(tensor, 1, size), "fill");
  const MapShape shape = {Type::kBf16,     Swizzle::k128,        4,
                          {64, 100, 3, 2}, {0, 384, 128, 38400}, {64, 64, 1, 1}};
  TensorMap map;
  must(encode(&map, tensor, shape) == 0 ? cudaSuccess : cudaErrorUnknown, "encode");
  copy_box<<<1, 32, kBoxBytes>>>(map, start, out);
  if (cudaDeviceSynchronize() != cudaSuccess) return kFault;
  int nonzero = -1;
  must(cudaMemcpy(&nonzero, out, sizeof nonzero, cudaMemcpyDeviceToHost), "read");
  return nonzero == 0 ? kNothing : kOther;
}

}  // namespace

void box_limits() {
  const int kFar = -2147483647 - 1;
  const int kStarts[] = {kFar,       kFar + 1,   -(1 << 30), -(1 << 29),   -(1 << 28),
                         -(1 << 24), -(1 << 16), -32769,     -32768,       -64,
                         1 << 16,    1 << 24,    1 << 30,    -(kFar + 64), -(kFar + 1)};
  for (int dimension = 0; dimension < 4; ++dimension) {
    std::string zeros, faults, other;
    for (const int coordinate : kStarts) {
      Start start = {};
      start.at[dimension] = coordinate;
      const int outcome = run_apart([&] { return load_at(start); });
      std::string& list = outcome == kNothing ? zeros : outcome == kFault ? faults : other;
      (list += ' ') += std::to_string(coordinate);
    }
    report("a box may start anywhere along dimension " + std::to_string(dimension),
           faults.empty() && other.empty(),
           words("zeros", zeros.c_str()) + words("faults", faults.c_str()) +
               words("other", other.c_str()));
  }
}

}  // namespace tea::probe
