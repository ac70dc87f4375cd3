// The counter in global memory from which the CTAs of a persistent kernel fetch tile numbers.
#pragma once
#include "hopper/device/ptx.cuh"

namespace tea::hopper {

// Dynamic tile scheduling: whichever CTA becomes free first fetches the next tile. The memory needs
// no initialisation before a launch: CTA 0 resets the counter and publishes the launch's number,
// which no earlier launch had. The last CTA to retire clears the number, because a launch that was
// captured in a CUDA graph is replayed with the same one.
struct TileCounter {
  int next, retired;  // retired: CTAs that will fetch no more
  uint64_t owner;     // the number of the launch that uses the counter

  // Called by one thread of CTA 0.
  TEA_DEVICE void reset(uint64_t launch) {
    next = retired = 0;
    store_release(owner, launch);
  }
  // Called by one thread of each CTA before its first fetch(). Spinning on CTA 0 cannot deadlock:
  // CTAs start in order and a launch has at most one per SM, so CTA 0 either runs already or will
  // be scheduled when other kernels make room, and no waiting CTA occupies its place.
  TEA_DEVICE void wait_for_reset(uint64_t launch) {
    while (load_acquire(owner) != launch) {
    }
  }
  TEA_DEVICE int fetch() { return atomicAdd(&next, 1); }
  // Called once by each CTA, after its last fetch().
  TEA_DEVICE void retire() {
    if (atomicAdd(&retired, 1) == static_cast<int>(gridDim.x) - 1) owner = 0;
  }
};

}  // namespace tea::hopper
