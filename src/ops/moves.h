// Operations that only move bytes. Each is a rule that says where move number i comes from and goes
// to; the rule is written once and serves the loop of the host and the kernel of a GPU.
#pragma once
#include <cstring>

#include "ops/args.h"

namespace tea {

struct Move {
  char* to = nullptr;          // NULL: nothing moves
  const char* from = nullptr;  // NULL: zeros
};

// What a rule derives from. It adds
//   Move at(int64_t i) const;      for i < moves; in any order, also side by side
//   void check(int64_t i) const;   for i < checks: reports nonsense in the metadata, once each
struct Moves {
  int64_t moves = 0, bytes = 0;  // how many, and of how many bytes each
  int64_t checks = 0;
  // All addresses, distances and sizes, OR-ed: zeros at its end are common to all of them.
  uint64_t alignment = 0;

  void align(const void* address) { alignment |= reinterpret_cast<uintptr_t>(address); }
  void align(int64_t distance) { alignment |= static_cast<uint64_t>(distance); }
};

// Instantiated in moves.cu for each rule. beside_last: the kernel before it on the stream is one of
// ours that lets the next begin and touches nothing that the moves do.
template <class Rule>
void run_on_gpu(const Rule& rule, const Place& place, bool beside_last);

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
void run(const Rule& rule, const Place& place, bool beside_last = false) {
  if (is_host(place))
    run_on_host(rule);
  else if constexpr (kGpuCode)
    run_on_gpu(rule, place, beside_last);
}

}  // namespace tea
