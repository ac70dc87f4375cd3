// The target of a plan: the host, or one GPU with its index and the properties that engines need.
#pragma once

namespace tea {

inline constexpr int kHost = -1;

struct Device {
  int index = kHost;
  // Properties of a GPU; 0 for the host.
  int sm = 0;  // 10 * major + minor
  int num_sms = 0;
  int shared_bytes = 0;  // maximum per CTA
  bool is_host() const { return index == kHost; }
};

// Throws Error if there is no such device, or this build has no engine for it.
Device device_at(int index);

}  // namespace tea
