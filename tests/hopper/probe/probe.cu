// Runs the probes named on the command line, each in a process of its own for the sake of those
// that measure a first call or end in a fault.
#include <algorithm>
#include <cstring>
#include <vector>

#include "hopper/probe/probe.h"
#include "hopper/tensor_map.h"

namespace tea::probe {
namespace {

template <int kBytes>
struct Parameters {
  char bytes[kBytes];
};

template <int kBytes>
__global__ void nothing(const __grid_constant__ Parameters<kBytes> p, int* out) {
  if (out) *out = p.bytes[threadIdx.x];
}

// The median host time of a launch, in batches that leave the queue far from full.
template <class F>
double median_ns(F&& launch) {
  std::vector<double> batches;
  for (int batch = 0; batch < 50; ++batch) {
    must(cudaDeviceSynchronize(), "synchronize");
    const double start = now_ns();
    for (int i = 0; i < 100; ++i) launch();
    batches.push_back((now_ns() - start) / 100);
  }
  std::sort(batches.begin(), batches.end());
  return batches[batches.size() / 2];
}

template <int kBytes>
void one_launch_cost(cudaStream_t stream) {
  const Parameters<kBytes> p{};
  const auto launch = [&] { nothing<kBytes><<<1, 32, 0, stream>>>(p, nullptr); };
  launch();
  report("launch cost, parameters of " + std::to_string(kBytes) + " bytes", true,
         figure("ns", median_ns(launch)));
}

}  // namespace

void device() {
  cudaDeviceProp p;
  must(cudaGetDeviceProperties(&p, 0), "properties");
  int sm_clock = 0, memory_clock = 0;
  must(cudaDeviceGetAttribute(&sm_clock, cudaDevAttrClockRate, 0), "clock");
  must(cudaDeviceGetAttribute(&memory_clock, cudaDevAttrMemoryClockRate, 0), "memory clock");
  report("device", p.major == 9,
         words("name", p.name) + figure("sms", p.multiProcessorCount) +
             figure("shared_per_block", p.sharedMemPerBlockOptin) +
             figure("shared_per_sm", p.sharedMemPerMultiprocessor) +
             figure("l2_bytes", p.l2CacheSize) +
             figure("persisting_l2", p.persistingL2CacheMaxSize) + figure("sm_khz", sm_clock) +
             figure("memory_khz", memory_clock) + figure("bus_bits", p.memoryBusWidth));
}

void launch_cost() {
  cudaStream_t stream;
  must(cudaStreamCreate(&stream), "stream");
  one_launch_cost<16>(stream);
  one_launch_cost<128>(stream);
  one_launch_cost<512>(stream);
  one_launch_cost<1024>(stream);
  one_launch_cost<3072>(stream);
  const auto attribute = [] {
    cudaFuncSetAttribute(nothing<128>, cudaFuncAttributeMaxDynamicSharedMemorySize, 65536);
  };
  report("cudaFuncSetAttribute cost", true, figure("ns", median_ns(attribute)));
  const auto clear = [&] {
    static int* word = [] {
      int* p;
      must(cudaMalloc(&p, 4), "allocation");
      return p;
    }();
    cudaMemsetAsync(word, 0, 4, stream);
  };
  report("cudaMemsetAsync cost", true, figure("ns", median_ns(clear)));
}

void map_cost() {
  using namespace tea::hopper;
  void* base;
  must(cudaMalloc(&base, 1 << 20), "allocation");
  TensorMap map;
  const MapShape good = {Type::kBf16,      Swizzle::k128,          4,
                         {128, 512, 4, 2}, {0, 1024, 256, 524288}, {64, 128, 1, 1}};
  report("tensor map encodes", encode(&map, base, good) == 0,
         figure("ns", median_ns([&] { encode(&map, base, good); })));
  const auto accepted = [&](const char* fact, auto change) {
    MapShape s = good;
    change(s);
    const int code = encode(&map, base, s);
    report(std::string("tensor map accepts ") + fact, code == 0, figure("code", code));
  };
  accepted("a stride of 1032 bytes", [](MapShape& s) { s.stride[1] = 1032; });
  accepted("a stride of 1040 bytes", [](MapShape& s) { s.stride[1] = 1040; });
  accepted("a stride of 0", [](MapShape& s) { s.stride[2] = 0; });
  accepted("a row stride of 0", [](MapShape& s) { s.stride[1] = 0; });
  accepted("a stride of 16", [](MapShape& s) { s.stride[1] = 16; });
  accepted("a stride of 2^40 - 16", [](MapShape& s) { s.stride[3] = (1ull << 40) - 16; });
  accepted("2^31 rows", [](MapShape& s) { s.extent[1] = 1ull << 31; });
  accepted("2^32 rows", [](MapShape& s) { s.extent[1] = 1ull << 32; });
  accepted("2^32 + 1 rows", [](MapShape& s) { s.extent[1] = (1ull << 32) + 1; });
  accepted("no rows", [](MapShape& s) { s.extent[1] = 0; });
  accepted("a box larger than the tensor", [](MapShape& s) { s.extent[1] = 3; });
  accepted("a head dimension of 8", [](MapShape& s) { s.extent[0] = 8; });
  accepted("a null base", [&](MapShape&) { base = nullptr; });
}

}  // namespace tea::probe

int main(int count, char** names) {
  using namespace tea::probe;
  const struct {
    const char* name;
    void (*run)();
  } kProbes[] = {
      {"device", device},
      {"launch_cost", launch_cost},
      {"map_cost", map_cost},
      {"capture_first", capture_first},
      {"capture_attributes", capture_attributes},
      {"capture_driver_first", capture_driver_first},
      {"box_limits", box_limits},
      {"guard_read", guard_read},
      {"guard_box", guard_box},
  };
  int known = 0;
  for (int i = 1; i < count; ++i)
    for (const auto& p : kProbes)
      if (strcmp(names[i], p.name) == 0) {
        p.run();
        ++known;
      }
  if (known == count - 1 && count > 1) return 0;
  fprintf(stderr, "usage: %s PROBE..., of", names[0]);
  for (const auto& p : kProbes) fprintf(stderr, " %s", p.name);
  fprintf(stderr, "\n");
  return 2;
}
