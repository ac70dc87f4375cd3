// Where a box may start: far outside a tensor, and along dimension 0 at which multiples. What the
// copy engine refuses ends the process's work on the device, so every coordinate is tried in a
// process of its own.
#include "hopper/apart.h"
#include "hopper/probe/probe.h"
#include "hopper/tensor_map.h"

namespace tea::probe {
namespace {

using namespace tea::hopper;

constexpr int kBoxBytes = 64 * 128;
enum Result { kNothing = 10, kOther, kFault };  // apart from what exit() gives otherwise

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

// Tries each start along a dimension; the three lists of those that gave zeros, fault, other.
struct Tried {
  std::string zeros, faults, other;
};
template <size_t kCount>
Tried try_starts(int dimension, const int (&starts)[kCount]) {
  Tried tried;
  for (const int coordinate : starts) {
    Start start = {};
    start.at[dimension] = coordinate;
    const int result = run_apart([&] { return load_at(start); });
    std::string& list = result == kNothing ? tried.zeros
                        : result == kFault ? tried.faults
                                           : tried.other;
    (list += ' ') += std::to_string(coordinate);
  }
  return tried;
}

void report_starts(const std::string& fact, bool holds, const Tried& t) {
  report(fact, holds,
         words("zeros", t.zeros.c_str()) + words("faults", t.faults.c_str()) +
             words("other", t.other.c_str()));
}

}  // namespace

void box_limits() {
  const int kFar = -2147483647 - 1;
  const int kStarts[] = {kFar,       kFar + 1,   -(1 << 30), -(1 << 29),   -(1 << 28),
                         -(1 << 24), -(1 << 16), -32769,     -32768,       -64,
                         1 << 16,    1 << 24,    1 << 30,    -(kFar + 64), -(kFar + 1)};
  for (int dimension = 0; dimension < 4; ++dimension) {
    const Tried tried = try_starts(dimension, kStarts);
    report_starts("a box may start anywhere along dimension " + std::to_string(dimension),
                  tried.faults.empty() && tried.other.empty(), tried);
  }
  // Elements of two bytes; partly inside, so that what comes is not all zeros.
  const int kOfEight[] = {-56, -40, -32, -24, -16, -8, 8, 16, 24, 32, 40, 48, 56};
  const int kOthers[] = {-33, -12, -4, -2, -1, 1, 2, 4, 12, 20, 31, 33, 36};
  const Tried aligned = try_starts(0, kOfEight), rest = try_starts(0, kOthers);
  report_starts("a box may start at any multiple of 16 bytes along dimension 0",
                aligned.faults.empty(), aligned);
  report_starts("no box may start elsewhere along dimension 0",
                rest.zeros.empty() && rest.other.empty(), rest);
}

}  // namespace tea::probe
