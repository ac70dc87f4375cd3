// What a plan is made for: the host, or one GPU by its index and compute capability.
#pragma once

namespace tea {

inline constexpr int kHost = -1;

struct Device {
  int index = kHost;
  int sm = 0;  // 10 * major + minor; 0 for the host
  bool is_host() const { return index == kHost; }
};

// Throws Error(TEA_INVALID) if there is no such device.
Device device_at(int index);

}  // namespace tea
