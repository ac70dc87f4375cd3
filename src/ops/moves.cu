// Moves of bytes. A group of adjacent threads makes one move. Each thread has four outstanding
// accesses of 16 bytes, or of fewer bytes if the addresses require it.
#include "ops/context_parallel.h"
#include "ops/flash_prepare.h"
#include "ops/kv_cache.h"
#include "ops/launch.cuh"
#include "ops/thd.h"

namespace tea {
namespace {

constexpr int kUnderWay = 4;

struct Group {
  int64_t units;  // accesses per move
  int access;     // bytes per access
  Team team;
};

Group group_of(const Moves& moves) {
  Group g{};
  g.access = access_bytes(moves.alignment);
  g.units = moves.bytes / g.access;
  g.team = Team::of(g.units, kUnderWay, kBlock);
  return g;
}

template <class Unit>
__device__ __forceinline__ void copy(const Move& move, const Group& g, int lane) {
  Unit* const to = reinterpret_cast<Unit*>(move.to);
  const Unit* const from = reinterpret_cast<const Unit*>(move.from);
  const int lanes = g.team.lanes();
  for (int64_t first = lane; first < g.units; first += kUnderWay * lanes) {
    Unit unit[kUnderWay] = {};
#pragma unroll
    for (int k = 0; k < kUnderWay; ++k)
      if (from && first + k * lanes < g.units) unit[k] = __ldg(from + first + k * lanes);
#pragma unroll
    for (int k = 0; k < kUnderWay; ++k)
      if (first + k * lanes < g.units) to[first + k * lanes] = unit[k];
  }
}

// Calls body(Unit()) for the unit of `access` bytes.
template <class Body>
__device__ __forceinline__ void with_unit(int access, const Body& body) {
  switch (access) {
    case 16:
      return body(uint4{});
    case 8:
      return body(uint2{});
    case 4:
      return body(uint32_t{});
    case 2:
      return body(uint16_t{});
    default:
      return body(uint8_t{});
  }
}

__device__ __forceinline__ void copy(const Move& move, const Group& g, int lane) {
  with_unit(g.access, [&](auto unit) { copy<decltype(unit)>(move, g, lane); });
}

template <class Rule>
__device__ __forceinline__ void make_moves(const Rule& rule, const Group& g) {
  run_checks(rule);
  const int lane = g.team.lane();
  for (int64_t i = g.team.index(); i < rule.moves; i += g.team.count()) {
    const Move move = rule.at(i);
    if (move.to) copy(move, g, lane);
  }
}

template <class Rule>
__global__ void __launch_bounds__(kBlock) move_bytes(const Rule rule, const Group g) {
  make_moves(rule, g);
  wait_on_dependent_grids();  // this grid must not complete before its predecessor
}

// The appends to K and V, in one launch.
struct Appends {
  AppendMoves moves[2];
  Group group[2];
};
__global__ void __launch_bounds__(kBlock) append_both(const __grid_constant__ Appends both) {
  if (blockIdx.y == 0)
    make_moves(both.moves[0], both.group[0]);
  else
    make_moves(both.moves[1], both.group[1]);
}

// ---- Rows of a cache that move
// -------------------------------------------------------------------

constexpr int kListed = kBlock;  // rows whose sources a CTA looks up at a time

// One access of the rows [first, end) at one slot: a thread makes the moves of its access in order.
// from: the sources of the rows.
template <class Unit>
__device__ __forceinline__ void reindex(const Reindex& r, const Reindex::Source* sources,
                                        int64_t first, int64_t end) {
  const int64_t units = r.runs.bytes / sizeof(Unit), of_slot = r.runs.moves * units;
  for (int64_t i = thread_index(); i < r.a.page_size * of_slot; i += thread_count()) {
    const int64_t t = quotient(i, of_slot), in_slot = i - t * of_slot;
    const int64_t run = quotient(in_slot, units), unit = in_slot - run * units;
    const auto place = [&](int64_t row) {
      return reinterpret_cast<Unit*>(r.cache.at(row, t, run)) + unit;
    };
    for (int64_t n = first; n < end; n += kUnderWay) {
      Reindex::Source from[kUnderWay];
      bool apart = true;  // no move reads a row that another of these moves writes
#pragma unroll
      for (int k = 0; k < kUnderWay; ++k) {
        from[k] = n + k < end ? sources[n + k - first] : Reindex::Source{0, 0};
        apart &= from[k].row < n || from[k].row >= n + k;
      }
      Unit value[kUnderWay];
#pragma unroll
      for (int k = 0; k < kUnderWay; ++k)
        if (apart && t < from[k].tokens) value[k] = *place(from[k].row);
#pragma unroll
      for (int k = 0; k < kUnderWay; ++k)
        if (t < from[k].tokens) *place(n + k) = apart ? value[k] : *place(from[k].row);
    }
  }
}

struct Reindexes {
  Reindex rows[2];
  int access[2];
};

// K and V in one launch.
__global__ void __launch_bounds__(kBlock, 4) reindex_cache(const __grid_constant__ Reindexes both) {
  __shared__ Reindex::Source sources[kListed];
  __shared__ unsigned long long last;  // live entries, if the list descends
  const Reindex& r = both.rows[blockIdx.y];
  if (threadIdx.x == 0) last = 0;
  __syncthreads();
  for (int64_t n = threadIdx.x; n < r.a.batch; n += blockDim.x)
    if (r.descends_after(n)) atomicMax(&last, static_cast<unsigned long long>(n + 1));
  __syncthreads();
  const int64_t live = last ? static_cast<int64_t>(last) : r.a.batch;
  for (int64_t first = 0; first < live; first += kListed) {
    const int64_t end = first + kListed < live ? first + kListed : live;
    if (first + threadIdx.x < end) sources[threadIdx.x] = r.source(first + threadIdx.x);
    __syncthreads();
    with_unit(both.access[blockIdx.y],
              [&](auto unit) { reindex<decltype(unit)>(r, sources, first, end); });
    __syncthreads();
  }
}

// ---- Gaps of a ragged batch ---------------------------------------------------------------------

constexpr int kOfTile = 32;  // rows per CTA

// A CTA collects the sequences that overlap its rows, marks those rows, then zeroes the others. It
// reads all sequences, because offsets need not ascend.
__global__ void __launch_bounds__(kBlock) zero_gaps(const ThdMoves m, const Group g) {
  launch_dependent_grids();
  __shared__ int2 span[kBlock];  // ranges of rows of the tile
  __shared__ int spans;
  __shared__ bool reached[kOfTile];
  for (int64_t first = int64_t{blockIdx.x} * kOfTile; first < m.a.tokens;
       first += int64_t{gridDim.x} * kOfTile) {
    const int64_t end = first + kOfTile < m.a.tokens ? first + kOfTile : m.a.tokens;
    if (threadIdx.x < kOfTile) reached[threadIdx.x] = false;
    for (int64_t pass = 0; pass < m.a.batch; pass += kBlock) {
      if (threadIdx.x == 0) spans = 0;
      __syncthreads();
      const int64_t i = pass + threadIdx.x;
      const Sequence s = i < m.a.batch ? m.sequence(i) : Sequence{0, 0, true};
      const int64_t from = s.start > first ? s.start : first;
      const int64_t to = s.start + s.length < end ? s.start + s.length : end;
      if (from < to)
        span[atomicAdd(&spans, 1)] = {static_cast<int>(from - first), static_cast<int>(to - first)};
      __syncthreads();
      const int row = threadIdx.x;
      for (int n = 0; row < kOfTile && n < spans; ++n)
        if (row >= span[n].x && row < span[n].y) reached[row] = true;
      __syncthreads();
    }
    __syncthreads();
    const int lane = g.team.lane();
    const int64_t runs = (end - first) * m.runs;
    for (int64_t i = threadIdx.x >> g.team.shift; i < runs; i += kBlock >> g.team.shift) {
      const int64_t row = quotient(i, m.runs);
      if (!reached[row]) copy({m.thd.at(0, first + row, i - row * m.runs), nullptr}, g, lane);
    }
    __syncthreads();
  }
}

}  // namespace

template <class Rule>
void run_on_gpu(const Rule& rule, const Place& place, bool overlaps_predecessor) {
  const bool moves = rule.moves && rule.bytes;
  if (!moves && !rule.checks) return;
  const Group group = group_of(rule);
  Rule work = rule;
  if (!moves) work.moves = 0;
  const Launch how = {"move_bytes",
                      blocks_for(std::max(work.moves * group.team.lanes(), work.checks))};
  if (overlaps_predecessor)
    launch_dependent(how, move_bytes<Rule>, place, work, group);
  else
    launch(how, move_bytes<Rule>, place, work, group);
}

template void run_on_gpu(const ThdMoves&, const Place&, bool);
template void run_on_gpu(const FlashPrepareMoves&, const Place&, bool);
template void run_on_gpu(const ReadHalfMoves&, const Place&, bool);
template void run_on_gpu(const OrderMoves&, const Place&, bool);
template void run_on_gpu(const ValidMoves&, const Place&, bool);

void append_on_gpu(const std::vector<AppendMoves>& sides, const Place& place) {
  Appends both{};
  int64_t threads = 0;
  for (size_t i = 0; i < sides.size(); ++i) {
    both.moves[i] = sides[i], both.group[i] = group_of(sides[i]);
    threads = std::max({threads, sides[i].moves * both.group[i].team.lanes(), sides[i].checks});
  }
  if (!threads) return;
  const dim3 grid(blocks_for(threads), static_cast<unsigned>(sides.size()));
  launch({"append_both", grid}, append_both, place, both);
}

void reindex_on_gpu(const std::vector<Reindex>& sides, const Place& place) {
  Reindexes both{};
  int64_t threads = 0;
  for (size_t i = 0; i < sides.size(); ++i) {
    const Moves& runs = sides[i].runs;
    both.rows[i] = sides[i], both.access[i] = access_bytes(runs.alignment);
    threads = std::max(threads, sides[i].a.page_size * runs.moves * (runs.bytes / both.access[i]));
  }
  const dim3 grid(blocks_for(threads), static_cast<unsigned>(sides.size()));
  launch({"reindex_cache", grid}, reindex_cache, place, both);
}

void zero_gaps_on_gpu(const ThdMoves& moves, const Place& place) {
  launch({"zero_gaps", blocks_for(moves.a.tokens, kOfTile)}, zero_gaps, place, moves,
         group_of(moves));
}

}  // namespace tea
