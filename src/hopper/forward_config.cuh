// What names a forward kernel, and what it is told: its row of the table (forward_launch.cuh), the
// type, the kind, and the parameters of a launch.
#pragma once
#include "hopper/device/tma.cuh"
#include "hopper/forward_general.cuh"

namespace tea::hopper {

// One row of the table: a shape of tile that fits the registers and the shared memory.
struct Row {
  int dim, dim_v, consumers, cols, q_stages;
  bool turns;          // consumers take turns at the matrix units
  bool rescale_early;  // O shrinks while the next scores are computed, else once O is there
  bool skips = false;  // a consumer hands back blocks that none of its own rows sees
  int kv_stages = 2;
  bool staged = false;  // O leaves by the copy engine, if shared memory has room for it
  bool apart = false;   // blocks that are skipped have no turn: consumers may be a block apart
  bool halves = false;  // a warp may soften the first half of a tile's first block only
};

// What a kernel does beside the plain product: nothing, a band, that and a soft cap or dropout,
// everything but a bias, or everything.
enum class Kind { kFull, kMasked, kCapped, kDropped, kGeneral, kBiased };

// What names a kernel.
struct Config {
  Row row;
  Type type;
  Kind kind;
  constexpr bool masked() const { return kind != Kind::kFull; }
  constexpr bool capped() const { return kind == Kind::kCapped; }
  constexpr bool dropped() const { return kind == Kind::kDropped; }
  constexpr bool general() const { return kind == Kind::kGeneral || biased(); }
  constexpr bool biased() const { return kind == Kind::kBiased; }
};

struct Parameters {
  TensorMap q, k, v, o;  // o: of rows that are staged
  Forward f;
  TileOrder order;  // of dense queries
  TileOrder::Steps<Divisor> steps;
  Divisor group;     // heads for each of keys
  bool alike;        // all sequences are,
  Common common;     // and this is what their tiles have in common
  Unit unit;         // of scores when nothing bends them any more
  float scale_log2;  // its factor for powers of two
  Cap cap;           // where a soft cap has kernels of its own
  uint64_t launch;   // whose tiles are claimed from the counter
  int bias_rows;     // of a bias in shared memory: see BiasTile
  TensorMap bias;
};

}  // namespace tea::hopper
