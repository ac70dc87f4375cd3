// Tests of scheduler.cuh: every tile is visited exactly once, by static and by dynamic blocks, and
// the order is what it says.
#include "hopper/device/tile_counter.cuh"
#include "hopper/device/work_queue.cuh"
#include "hopper/forward/tile_order.cuh"
#include "hopper/primitives.h"

namespace tea::primitives {
namespace {

using namespace tea::hopper;

TEA_DEVICE void visit(const TileOrder& order, int number, int* visits) {
  const TileIndex t = order.at(number);
  atomicAdd(&visits[(t.batch * order.heads + t.head) * order.row_blocks + t.row_block], 1);
}

__global__ void visit_static(TileOrder order, int* visits) {
  for (int n = static_cast<int>(blockIdx.x); n < order.count(); n += static_cast<int>(gridDim.x))
    if (threadIdx.x == 0) visit(order, n, visits);
}

// Warp 0 claims; every other thread reads the mail and counts itself.
__global__ void visit_dynamic(TileOrder order, TileCounter* claims, uint64_t launch, int* visits) {
  if (blockIdx.x == 0 && threadIdx.x == 0) claims->reset(launch);
  __shared__ WorkQueue<int> mail;
  if (threadIdx.x == 0) {
    mail.pipeline.init(1, blockDim.x - 32);
    fence_barrier_init();
  }
  __syncthreads();
  PipelineState<2> at;
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) claims->wait_for_reset(launch);
    for (int n = 0; threadIdx.x == 0 && n < order.count();) {
      n = claims->fetch();
      mail.acquire(at) = n;
      mail.publish(at);
    }
    if (threadIdx.x == 0) claims->retire();
  } else {
    for (;;) {
      const int n = mail.read(at);
      mail.pipeline.consumer_release(at);
      at.advance();
      if (n >= order.count()) break;
      visit(order, n, visits);
    }
  }
}

void check(const TileOrder& order) {
  const std::string name = std::to_string(order.row_blocks) + " x " + std::to_string(order.heads) +
                           " x " + std::to_string(order.batch) + ", " +
                           std::to_string(order.heads_at_once) + " heads at once";
  const std::vector<int> zeros(order.count(), 0);
  const Buffer<int> statics(zeros), dynamics(zeros);
  const Buffer<TileCounter> claims(1);  // uninitialised
  visit_static<<<132, 32>>>(order, statics.data);
  for (const uint64_t launch : {7, 7, 9})  // as a captured launch comes again, then another
    visit_dynamic<<<132, 96>>>(order, claims.data, launch, dynamics.data);
  finish("tiles " + name);
  expect(statics.read() == std::vector<int>(order.count(), 1), "static tiles " + name);
  expect(dynamics.read() == std::vector<int>(order.count(), 3 * 64), "dynamic tiles " + name);
}

// One warp asks for every number of `step`, as a block among several would.
__global__ void find_in_sequences(const int* tiles, int sequences, int step, int2* found) {
  SequenceSearch search;
  const auto tiles_of = [&](int i) { return tiles[i]; };
  int sequence, rest, n = 0;
  for (; search.find(n, sequences, tiles_of, sequence, rest); n += step)
    if (threadIdx.x == 0) found[n] = {sequence, rest};
  if (threadIdx.x == 0) found[n] = {-1, -1};
}
void check_sequences(int sequences) {
  std::vector<int> tiles;
  std::vector<int2> want;
  for (int i = 0; i < sequences; ++i) {
    tiles.push_back(random_int(0, 3) * random_int(0, 40));
    for (int rest = 0; rest < tiles[i]; ++rest) want.push_back({i, rest});
  }
  tiles.push_back(7);  // beyond the last: must not be counted
  const Buffer<int> device_tiles(tiles);
  for (const int step : {1, 7, 132}) {
    const int asked = (static_cast<int>(want.size()) + step - 1) / step;
    const Buffer<int2> found(asked * step + 1);
    find_in_sequences<<<1, 32>>>(device_tiles.data, sequences, step, found.data);
    finish("sequence tiles");
    const std::vector<int2> got = found.read();
    bool right = got[asked * step].x == -1;
    for (int n = 0; n < static_cast<int>(want.size()); n += step)
      right = right && got[n].x == want[n].x && got[n].y == want[n].y;
    expect(right,
           "tiles of " + std::to_string(sequences) + " sequences, every " + std::to_string(step));
  }
}

// The same with several sequences together.
__global__ void find_in_groups(const int* blocks, int sequences, FastDivisor heads, int group,
                               int step, TileIndex* found) {
  SequenceGroupSearch tiles;
  TileIndex t;
  int n = 0;
  for (; tiles.find(
           n, sequences, heads, group, [&](int i) { return blocks[i]; }, t);
       n += step)
    if (threadIdx.x == 0) found[n] = t;
  if (threadIdx.x == 0) found[n] = {-1, -1, -1};
}
void check_groups(int sequences, int heads, int group) {
  std::vector<int> blocks;
  for (int i = 0; i < sequences; ++i) blocks.push_back(random_int(0, 3) * random_int(0, 4));
  std::vector<TileIndex> want;
  for (int first = 0; first < sequences; first += group)
    for (int level = 12; level > 0; --level)
      for (int i = first; i < std::min(first + group, sequences); ++i)
        for (int head = 0; head < heads && blocks[i] >= level; ++head)
          want.push_back({level - 1, head, i});
  blocks.push_back(7);  // beyond the last: must not be counted
  const Buffer<int> device_blocks(blocks);
  for (const int step : {1, 7, 132}) {
    const int asked = (static_cast<int>(want.size()) + step - 1) / step;
    const Buffer<TileIndex> found(asked * step + 1);
    find_in_groups<<<1, 32>>>(device_blocks.data, sequences, FastDivisor(heads), group, step,
                              found.data);
    finish("group tiles");
    const std::vector<TileIndex> got = found.read();
    bool right = got[asked * step].head == -1;
    for (int n = 0; n < static_cast<int>(want.size()); n += step)
      right = right && got[n].row_block == want[n].row_block && got[n].head == want[n].head &&
              got[n].batch == want[n].batch;
    expect(right, std::to_string(group) + " of " + std::to_string(sequences) +
                      " sequences together, every " + std::to_string(step));
  }
}

void test_order() {
  const TileOrder order{5, 3, 2, 4, true};
  bool falls = true, together = true;
  const auto section = [](const TileIndex& t) {
    return (t.batch * 3 + t.head + 2) / 4;
  };  // 2, then 4
  for (int n = 1; n < order.count(); ++n) {
    const TileIndex before = order.at(n - 1), now = order.at(n);
    const bool same = section(now) == section(before);
    falls = falls && (!same || now.row_block <= before.row_block);
    together = together && (same || (before.row_block == 0 && now.row_block == 4));
  }
  expect(falls, "TileOrder: longest first within the heads at once");
  expect(together, "TileOrder: one group of heads after the other");
}

}  // namespace

void test_schedules() {
  test_order();
  for (const int sequences : {0, 1, 31, 32, 33, 64, 500}) check_sequences(sequences);
  for (const int sequences : {1, 31, 33, 100})
    for (const int group : {2, 8, 32}) check_groups(sequences, 3, group);
  check({7, 3, 2, 1, false});
  check({7, 3, 2, 4, true});
  check({1, 1, 1, 8, true});
  check({64, 16, 5, 6, true});
  check({128, 8, 16, 3, false});
}

}  // namespace tea::primitives
