// Which tile a persistent block works on next. A tile is a block of query rows of one head of one
// batch entry; tiles are numbered in an order that shares keys and values in the cache.
#pragma once
#include "hopper/device/barrier.cuh"
#include "hopper/device/tile.cuh"

namespace tea::hopper {

struct Tile {
  int row_block, head, batch;
};

// A positive number by which others, below 2^31 and not negative, are divided without a division
// (Granlund and Montgomery, 1994): the host prepares it. A division is 25 instructions, and what
// comes before a launch's first tile comes from memory that no cache holds yet.
struct Divisor {
  int value;
  uint32_t factor;
  int shift;

  Divisor() = default;
  __host__ __device__ explicit Divisor(int divisor) : value(divisor), shift(0) {
    while (int64_t{1} << shift < divisor) ++shift;
    const uint64_t excess = (uint64_t{1} << shift) - static_cast<uint64_t>(divisor);
    factor = static_cast<uint32_t>((excess << 32) / static_cast<uint64_t>(divisor) + 1);
  }
  __host__ __device__ operator int() const { return value; }
  friend __host__ __device__ int operator/(int n, const Divisor& d) {
    const uint64_t product = uint64_t{d.factor} * static_cast<uint32_t>(n);
    return static_cast<int>((static_cast<uint32_t>(product >> 32) + n) >> d.shift);
  }
  friend __host__ __device__ int operator%(int n, const Divisor& d) { return n - n / d * d.value; }
};

// heads_at_once: heads whose rows are visited together, as many as keep their keys and values in
// the cache; what is left over goes first, since the last tiles must be many to end evenly.
// longest_first: later rows before earlier ones, so that under a causal mask the short tiles fill
// the tail.
struct TileOrder {
  int row_blocks, heads, batch, heads_at_once;
  bool longest_first;

  __host__ __device__ int count() const { return row_blocks * heads * batch; }
  // Where lengths differ, and only the device knows them: sequences whose tiles are visited
  // together, a power of two.
  __host__ __device__ int sequences_at_once() const {
    int n = 1;
    while (longest_first && n < 32 && 2 * n * heads <= heads_at_once) n *= 2;
    return n;
  }

  // What numbers are divided by, the same for all: D is int, or Divisor where the host prepares it.
  // left: heads that are left over, over: the same but never 0; a section is a round of heads.
  template <class D>
  struct Steps {
    int left;
    D over, width, section, heads;
  };
  template <class D>
  __host__ __device__ Steps<D> steps() const {
    const int left = heads * batch % heads_at_once, section = row_blocks * heads_at_once;
    return {left, D(left > 0 ? left : 1), D(heads_at_once), D(section > 0 ? section : 1), D(heads)};
  }

  __host__ __device__ Tile at(int number) const { return at(number, steps<int>()); }
  template <class D>
  __host__ __device__ Tile at(int number, const Steps<D>& by) const {
    const int late = number - by.left * row_blocks;
    int first = 0, row = 0, head = 0;
    if (late < 0) {
      row = number / by.over, head = number % by.over;
    } else {
      const int section = late / by.section, rest = late % by.section;
      first = by.left + section * by.width;
      row = rest / by.width, head = rest % by.width;
    }
    head += first;
    return {longest_first ? row_blocks - 1 - row : row, head % by.heads, head / by.heads};
  }
};

// Static: block b takes tiles b, b + blocks, ... With no communication, and the same every time.
struct StaticTiles {
  int next, step;
  TEA_DEVICE StaticTiles()
      : next(static_cast<int>(blockIdx.x)), step(static_cast<int>(gridDim.x)) {}
  TEA_DEVICE int take() {
    const int taken = next;
    next += step;
    return taken;
  }
};

// Dynamic: the first free block claims the next tile. Nobody clears the counter before a launch:
// block 0 does, and says so with the launch's number, which no launch had before. The last block
// takes that back, since a captured launch comes again with the number it had.
struct Claims {
  int next, gone;     // gone: blocks that claim no more
  uint64_t launched;  // whose counter this is

  // By one thread of block 0.
  TEA_DEVICE void open(uint64_t launch) {
    next = gone = 0;
    store_release(launched, launch);
  }
  // By one thread of each block: first this, then any number of claims, then leave(). Waits for
  // block 0, which is on a processor or comes to one when other kernels make room: blocks start in
  // order, and a launch has no more of them than there are processors, so none that waits is in its
  // way.
  TEA_DEVICE void enter(uint64_t launch) {
    while (load_acquire(launched) != launch) {
    }
  }
  TEA_DEVICE int claim() { return atomicAdd(&next, 1); }
  TEA_DEVICE void leave() {
    if (atomicAdd(&gone, 1) == static_cast<int>(gridDim.x) - 1) launched = 0;
  }
};

// Tiles of sequences of which only the device knows the lengths: a warp counts those of 32
// sequences at a time. All its lanes ask, for numbers that do not fall.
struct SequenceTiles {
  int window = -32, before = 0, inclusive = 0, total = 0;

  // Tile `number` is number `rest` of its sequence. False past the last one.
  template <class Count>
  TEA_DEVICE bool find(int number, int sequences, Count&& tiles_of, int& sequence, int& rest) {
    while (number - before >= total) {
      if (window + 32 >= sequences) return false;
      before += total;
      window += 32;
      inclusive = window + lane() < sequences ? tiles_of(window + lane()) : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(0xffffffff, inclusive, step);
        if (lane() >= step) inclusive += below;
      }
      total = __shfl_sync(0xffffffff, inclusive, 31);
    }
    const int index = __popc(__ballot_sync(0xffffffff, number - before >= inclusive));
    const int passed = __shfl_sync(0xffffffff, inclusive, index > 0 ? index - 1 : 0);
    sequence = window + index;
    rest = number - before - (index > 0 ? passed : 0);
    return true;
  }
};

// The same with the tiles of `group` neighbours visited together, longest first: else the long
// tiles of the last sequence would begin when everything else is over. A sequence has blocks_of()
// row blocks for each head.
struct GroupTiles {
  SequenceTiles search{};

  template <class D, class Count>
  TEA_DEVICE bool find(int number, int sequences, const D& heads, int group, Count&& blocks_of,
                       Tile& t) {
    const auto tiles_of = [&](int sequence) { return blocks_of(sequence) * heads; };
    int sequence, rest;
    if (!search.find(number, sequences, tiles_of, sequence, rest)) return false;
    const int start = (sequence - search.window) / group * group;  // the group's first lane
    const int below = __shfl_up_sync(0xffffffff, search.inclusive, 1);
    const int before = lane() > 0 ? below : 0;  // tiles of the window before this lane's
    const bool mine = lane() / group == start / group;
    const int blocks = mine ? (search.inclusive - before) / heads : 0;
    rest = number - search.before - __shfl_sync(0xffffffff, before, start);
    int level = __reduce_max_sync(0xffffffff, blocks);
    for (;; --level) {
      const uint32_t as_long = __ballot_sync(0xffffffff, blocks >= level);
      const int tiles = __popc(as_long) * heads;
      if (rest < tiles) {
        const int rank = __popc(as_long & ((1u << lane()) - 1));
        const bool chosen = blocks >= level && rank == rest / heads;
        const int at = __ffs(static_cast<int>(__ballot_sync(0xffffffff, chosen))) - 1;
        t = {level - 1, rest % heads, search.window + at};
        return true;
      }
      rest -= tiles;
    }
  }
};

// How one role tells the others what to work on, one message ahead. A reader lets go of a message
// when it needs it no longer.
template <class Message>
struct Mail {
  Ring<2> ring;
  Message message[2];

  // The message to write before it is posted.
  TEA_DEVICE Message& blank(Position<2> at) {
    ring.wait_empty(at);
    return message[at.stage];
  }
  TEA_DEVICE void post(Position<2>& at) {
    arrive(ring.full[at.stage]);  // releases the writes to whoever waits
    at.advance();
  }
  TEA_DEVICE const Message& read(Position<2> at) {
    ring.wait_full(at);
    return message[at.stage];
  }
};

}  // namespace tea::hopper
