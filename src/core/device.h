// What a plan is made for: the host, or one GPU by its index and what an engine must know of it.
#pragma once

namespace tea {

inline constexpr int kHost = -1;

struct Device {
  int index = kHost;
  // Of a GPU; 0 for the host.
  int sm = 0;  // 10 * major + minor
  int multiprocessors = 0;
  int shared_bytes = 0;  // of one block at most
  bool is_host() const { return index == kHost; }
};

// Throws Error if there is no such device, or this build has no engine for it.
Device device_at(int index);

}  // namespace tea
