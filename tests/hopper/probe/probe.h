// Facts of the machine that the design leans on: each probe prints JSON lines {"fact": ..., ...}.
#pragma once
#include <cuda_runtime.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace tea::probe {

// Whether a fact holds, with figures as further JSON members (", \"ns\": 3"), or nothing.
inline void report(const std::string& fact, bool holds, const std::string& figures = "") {
  printf("{\"fact\": \"%s\", \"holds\": %s%s}\n", fact.c_str(), holds ? "true" : "false",
         figures.c_str());
  fflush(stdout);
}
template <class T>
std::string figure(const char* name, T value) {
  return std::string(", \"") + name + "\": " + std::to_string(value);
}
inline std::string words(const char* name, const char* value) {
  return std::string(", \"") + name + "\": \"" + value + "\"";
}

inline double now_ns() {
  const auto t = std::chrono::steady_clock::now().time_since_epoch();
  return static_cast<double>(std::chrono::duration_cast<std::chrono::nanoseconds>(t).count());
}

// What cannot fail unless the probe itself is wrong.
inline void must(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  printf("{\"broken\": \"%s\", \"error\": \"%s\"}\n", what, cudaGetErrorString(code));
  exit(1);
}

void device();         // limits, cache, clocks
void launch_cost();    // host time of a launch by size of its parameters
void map_cost();       // host time of encoding a tensor map, and what it accepts
void capture_first();  // the process's first launch of a kernel, inside a stream capture
void capture_attributes();
void capture_driver_first();  // the process's first runtime call of all, likewise
void box_limits();            // where a box may start
void guard_read();            // a read past a mapping's end faults
void guard_box();             // a box that ends outside the tensor, at the mapping's end, does not

}  // namespace tea::probe
