// Tests of scheduler.cuh: every tile is visited exactly once, by static and by dynamic blocks, and
// the order is what it says.
#include <algorithm>

#include "hopper/device/scheduler.cuh"
#include "hopper/words.h"

namespace tea::words {
namespace {

using namespace tea::hopper;

TEA_DEVICE void visit(const TileOrder& order, int number, int* visits) {
  const Tile t = order.at(number);
  atomicAdd(&visits[(t.batch * order.heads + t.head) * order.row_blocks + t.row_block], 1);
}

__global__ void visit_static(TileOrder order, int* visits) {
  StaticTiles tiles;
  for (int n = tiles.take(); n < order.count(); n = tiles.take())
    if (threadIdx.x == 0) visit(order, n, visits);
}

// Warp 0 claims; every other thread reads the mail and counts itself.
__global__ void visit_dynamic(TileOrder order, int* counter, int* visits) {
  __shared__ TileMail mail;
  if (threadIdx.x == 0) {
    mail.ring.start(1, blockDim.x - 32);
    publish_barriers();
  }
  __syncthreads();
  Position<2> at;
  if (threadIdx.x < 32) {
    for (int n = 0; threadIdx.x == 0 && n < order.count();) {
      n = claim_tile(counter);
      mail.post(at, n);
    }
  } else {
    for (int n = mail.read(at); n < order.count(); n = mail.read(at)) visit(order, n, visits);
  }
}

void check(const TileOrder& order) {
  const std::string name = std::to_string(order.row_blocks) + " x " + std::to_string(order.heads) +
                           " x " + std::to_string(order.batch) + ", " +
                           std::to_string(order.heads_at_once) + " heads at once";
  const std::vector<int> zeros(order.count(), 0);
  const Buffer<int> statics(zeros), dynamics(zeros), counter(std::vector<int>{0});
  visit_static<<<132, 32>>>(order, statics.data);
  visit_dynamic<<<132, 96>>>(order, counter.data, dynamics.data);
  finish("tiles " + name);
  expect(statics.read() == std::vector<int>(order.count(), 1), "static tiles " + name);
  expect(dynamics.read() == std::vector<int>(order.count(), 64), "dynamic tiles " + name);
}

void test_order() {
  const TileOrder order{5, 3, 2, 4, true};
  bool falls = true, together = true;
  for (int n = 1; n < order.count(); ++n) {
    const Tile before = order.at(n - 1), now = order.at(n);
    const int section = (now.batch * 3 + now.head) / 4;
    const bool same = section == (before.batch * 3 + before.head) / 4;
    falls = falls && (!same || now.row_block <= before.row_block);
    together = together && (same || (before.row_block == 0 && now.row_block == 4));
  }
  expect(falls, "TileOrder: longest first within the heads at once");
  expect(together, "TileOrder: one group of heads after the other");
}

// Of 132 blocks that claim causal tiles as they become free: the mean share of work over the
// largest. A tile costs its blocks of keys and two more.
double balance(const TileOrder& order) {
  std::vector<int> load(132, 0);
  int total = 0;
  for (int n = 0; n < order.count(); ++n) {
    const int cost = order.at(n).row_block + 3;
    *std::min_element(load.begin(), load.end()) += cost;
    total += cost;
  }
  return total / 132.0 / *std::max_element(load.begin(), load.end());
}

// 16 heads of 16384 tokens in sequences of `rows`, 32 MB of keys and values at once.
void test_balance() {
  for (const int rows : {512, 2048, 4096, 16384}) {
    const TileOrder order{rows / 128, 16, 16384 / rows, 65536 / rows, true};
    expect(balance(order) > 0.97, "balance of causal tiles, " + std::to_string(rows) +
                                      " rows: " + std::to_string(balance(order)));
  }
}

}  // namespace

void test_schedules() {
  test_order();
  test_balance();
  check({7, 3, 2, 1, false});
  check({7, 3, 2, 4, true});
  check({1, 1, 1, 8, true});
  check({64, 16, 5, 6, true});
  check({128, 8, 16, 3, false});
}

}  // namespace tea::words
