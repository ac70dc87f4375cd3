// Each word of src/hopper/device, alone on the device, against a plain computation on the host. A
// group of tests runs in a process of its consumer_blocks, since a fault on the device ends all
// work there. Needs an sm_90 device; without one it says so and exits with 77.
#include <iterator>

#include "hopper/apart.h"
#include "hopper/primitives.h"

namespace tea::primitives {
namespace {

constexpr int kNoDevice = 77;

struct Group {
  const char* name;
  void (*run)();
};
constexpr Group kGroups[] = {
    {"ptx", test_ptx},
    {"barriers", test_barriers},
    {"loads", test_loads},
    {"copies", test_copies},
    {"matrices", test_matrices},
    {"tiles", test_tiles},
    {"schedules", test_schedules},
};

// In the child: nothing of the device was touched before.
int run(const Group& group) {
  cudaDeviceProp device;
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major != 9) return kNoDevice;
  group.run();
  printf("%s: %d passed, %d failed\n", group.name, passed, failed);
  return failed != 0;
}

}  // namespace
}  // namespace tea::primitives

int main() {
  using namespace tea::primitives;
  int failures = 0, absent = 0;
  for (const Group& group : kGroups) {
    const int status = tea::run_apart([&] { return run(group); });
    absent += status == kNoDevice;
    failures += status != 0;
    if (status != 0 && status != kNoDevice) printf("FAILED group %s: %d\n", group.name, status);
  }
  if (absent) {
    printf("not run: no device of compute capability 9.0\n");
    return kNoDevice;
  }
  printf("%d of %zu groups failed\n", failures, std::size(kGroups));
  return failures != 0;
}
