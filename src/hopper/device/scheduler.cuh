// Which tile a persistent block works on next. A tile is a block of query rows of one head of one
// batch entry; tiles are numbered in an order that shares keys and values in the cache.
#pragma once
#include "hopper/device/barrier.cuh"

namespace tea::hopper {

struct Tile {
  int row_block, head, batch;
};

// heads_at_once: heads whose rows are visited together, as many as keep their keys and values in
// the cache. longest_first: later rows before earlier ones, so that under a causal mask the short
// tiles fill the tail.
struct TileOrder {
  int row_blocks, heads, batch, heads_at_once;
  bool longest_first;

  __host__ __device__ int count() const { return row_blocks * heads * batch; }

  __host__ __device__ Tile at(int number) const {
    const int section = number / (row_blocks * heads_at_once), first = section * heads_at_once;
    const int rest = number - first * row_blocks, left = heads * batch - first;
    const int width = left < heads_at_once ? left : heads_at_once;
    const int row = rest / width, head = first + rest % width;
    return {longest_first ? row_blocks - 1 - row : row, head % heads, head / heads};
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

// Dynamic: the first free block takes the next tile. The counter is zero at the start.
TEA_DEVICE int claim_tile(int* counter) { return atomicAdd(counter, 1); }

// How one thread of the block tells the others which tile it claimed, one ahead.
struct TileMail {
  Ring<2> ring;
  int number[2];

  TEA_DEVICE void post(Position<2>& at, int tile) {
    ring.wait_empty(at);
    number[at.stage] = tile;
    arrive(ring.full[at.stage]);  // releases the write to whoever waits
    at.advance();
  }
  TEA_DEVICE int read(Position<2>& at) {
    ring.wait_full(at);
    const int tile = number[at.stage];
    ring.release(at);
    at.advance();
    return tile;
  }
};

}  // namespace tea::hopper
