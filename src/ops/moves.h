// Operations that only move bytes. Each is a rule for the source and destination of move i, which
// is written once for the loop of the host and the kernel of a GPU.
#pragma once
#include <cstring>

#include "ops/args.h"

namespace tea {

struct Move {
  char* to = nullptr;          // NULL: nothing moves
  const char* from = nullptr;  // NULL: zeros
};

// The base class of a rule, which adds
//   Move at(int64_t i) const;      for i < moves; in any order, also concurrently
//   void check(int64_t i) const;   for i < checks: reports invalid metadata, once each
struct Moves {
  int64_t moves = 0, bytes = 0;  // number of moves, and bytes of each
  int64_t checks = 0;
  // All addresses, distances and sizes, OR-ed: its trailing zeros are the common alignment.
  uint64_t alignment = 0;

  void align(const void* address) { alignment |= reinterpret_cast<uintptr_t>(address); }
  void align(int64_t distance) { alignment |= static_cast<uint64_t>(distance); }
};

// Instantiated in moves.cu for each rule. overlaps_predecessor: the predecessor grid on the stream
// calls launch_dependent_grids() and accesses none of the memory of these moves.
template <class Rule>
void run_on_gpu(const Rule& rule, const Place& place, bool overlaps_predecessor);

template <class Rule>
void run_on_host(const Rule& rule) {
  for (int64_t i = 0; i < rule.checks; ++i) rule.check(i);
  const auto bytes = static_cast<size_t>(rule.bytes);
  for (int64_t i = 0; bytes && i < rule.moves; ++i) {
    const Move move = rule.at(i);
    if (!move.to) continue;
    if (move.from)
      std::memcpy(move.to, move.from, bytes);
    else
      std::memset(move.to, 0, bytes);
  }
}

template <class Rule>
void run(const Rule& rule, const Place& place, bool overlaps_predecessor = false) {
  if (is_host(place))
    run_on_host(rule);
  else if constexpr (kGpuCode)
    run_on_gpu(rule, place, overlaps_predecessor);
}

}  // namespace tea
