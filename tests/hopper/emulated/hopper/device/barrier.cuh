// Barriers for one thread on the host: nobody waits.
#pragma once
#include "hopper/device/ptx.cuh"

namespace tea::hopper {

struct Barrier {};
inline void arrive(Barrier&) {}
template <int kStages>
struct Position {
  int stage = 0;
  void advance() {}
};
template <int kStages>
struct Ring {
  Barrier full[kStages], empty[kStages];
  void wait_empty(Position<kStages>) {}
  void wait_full(Position<kStages>) {}
};

}  // namespace tea::hopper
