// Each word of src/hopper/device, alone on the device, against a plain computation on the host.
// Needs an sm_90 device; without one it says so and exits with 77.
#include "hopper/words.h"

int main() {
  using namespace tea::words;
  cudaDeviceProp device;
  if (cudaGetDeviceProperties(&device, 0) != cudaSuccess || device.major != 9) {
    printf("not run: no device of compute capability 9.0\n");
    return 77;
  }
  test_ptx();
  test_barriers();
  test_copies();
  test_matrices();
  test_tiles();
  test_schedules();
  printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}
