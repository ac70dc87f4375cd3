// Which blocks each consumer of a tile works on, and that consumers which may be a block apart
// never wait for ever: the planner's code compiled for the host, and the roles' acts one by one.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "hopper/forward/work_tile.cuh"

namespace tea::hopper {
namespace {

// The next action of a role: waits for a stage, releases one, or takes its ping-pong slot.
struct Act {
  enum What { kWaitK, kFreeK, kWaitV, kFreeV, kAskTurn, kPassTurn } what;
};

// A consumer's acts in a tile where consumers may be apart, as Consumer::attend() orders them.
void act_out(std::vector<Act>* to, const WorkTile& w, int consumer) {
  const auto add = [&](std::initializer_list<Act::What> acts) {
    for (const Act::What a : acts) to->push_back({a});
  };
  const Range own = w.consumer_blocks[consumer];
  const int count = w.blocks.end - w.blocks.begin, mine = own.end - own.begin;
  const auto first = [&](int blocks, int slots) {
    for (int i = 0; i < std::max(blocks, slots); ++i) {
      if (i < blocks) add({Act::kWaitK, Act::kFreeK});
      if (i < slots) add({Act::kAskTurn, Act::kPassTurn});
      if (i + 1 < blocks) add({Act::kWaitV, Act::kFreeV});
    }
  };
  if (mine <= 0) {
    first(count, w.max_consumer_blocks);
    if (count > 0) add({Act::kWaitV, Act::kFreeV});
    return;
  }
  const int lead = w.blocks.end - own.end, trail = own.begin - w.blocks.begin;
  first(lead, w.max_consumer_blocks - mine);
  add({Act::kWaitK, Act::kAskTurn, Act::kPassTurn, Act::kFreeK});
  if (lead > 0) add({Act::kWaitV, Act::kFreeV});
  for (int i = 1; i < mine; ++i)
    add({Act::kWaitK, Act::kAskTurn, Act::kWaitV, Act::kPassTurn, Act::kFreeK, Act::kFreeV});
  add({Act::kWaitV, Act::kFreeV});
  for (int i = 0; i < trail; ++i) add({Act::kWaitK, Act::kFreeK, Act::kWaitV, Act::kFreeV});
}

// Whether the roles of a block, with these tiles before them and so many stages, all come to their
// end, each going on as soon as it may.
bool all_end(const std::vector<WorkTile>& tiles, int consumers, int stages) {
  std::vector<bool> loads;  // true: of values
  std::vector<std::vector<Act>> acts(static_cast<size_t>(consumers));
  for (const WorkTile& w : tiles) {
    const int count = w.blocks.end - w.blocks.begin;
    if (count > 0) loads.push_back(false);
    for (int i = 1; i < count; ++i) loads.push_back(false), loads.push_back(true);
    if (count > 0) loads.push_back(true);
    for (int c = 0; c < consumers; ++c) act_out(&acts[static_cast<size_t>(c)], w, c);
  }
  struct State {
    size_t next = 0;
    int handoffs = 0, waited[2] = {}, freed[2] = {};
  };
  std::vector<State> at(static_cast<size_t>(consumers));
  size_t loaded = 0;
  int full[2] = {};
  for (bool moved = true; moved;) {
    moved = false;
    for (; loaded < loads.size(); ++loaded, moved = true) {
      const int side = loads[loaded];
      int least = INT32_MAX;
      for (const State& s : at) least = std::min(least, s.freed[side]);
      if (full[side] - least >= stages) break;
      ++full[side];
    }
    for (size_t c = 0; c < at.size(); ++c) {
      State& s = at[c];
      for (; s.next < acts[c].size(); ++s.next, moved = true) {
        const Act::What what = acts[c][s.next].what;
        const int side = what == Act::kWaitV || what == Act::kFreeV;
        if (what == Act::kWaitK || what == Act::kWaitV) {
          if (full[side] <= s.waited[side]) break;
          ++s.waited[side];
        } else if (what == Act::kFreeK || what == Act::kFreeV) {
          ++s.freed[side];
        } else if (what == Act::kPassTurn) {
          ++s.handoffs;
        } else {
          const int before = at[c ? c - 1 : at.size() - 1].handoffs;
          if (before < s.handoffs + (c ? 1 : 0)) break;
        }
      }
    }
  }
  for (size_t c = 0; c < at.size(); ++c)
    if (at[c].next < acts[c].size() || at[c].handoffs != at[0].handoffs) return false;
  return loaded == loads.size();
}

// The blocks of each consumer are what its rows see between them, the most of them are counted, and
// neither stages nor ping-pong slots keep a role from its end.
template <int kRows, int kCols>
void check_shares(uint32_t seed, int stages) {
  std::mt19937 generator(seed);
  const auto between = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(generator);
  };
  AttentionArguments f = {};
  f.batch = 1, f.heads_q = f.heads_kv = 1, f.dim_qk = f.dim_v = 64;
  f.queries.max_seqlen = between(1, 1100), f.keys.max_seqlen = between(1, 1100);
  f.mask = {between(0, 1), between(0, 1), between(0, 1) ? between(1, 600) : 0,
            between(0, 1) ? between(1, 600) : 0};
  for (int64_t& o : f.origin) o = between(0, 1) ? between(0, 300) : 0;
  std::vector<WorkTile> tiles;
  for (int n = 0; n < 12; ++n) {
    WorkTile w;
    const TileIndex tile = {between(0, (f.queries.max_seqlen - 1) / kRows), 0, 0};
    describe<kRows, kCols>(w, f, bounds_of(f, 0), 1, tile);
    describe_consumer_blocks<kRows, kCols>(w);
    int most = 0;
    for (int c = 0; c < kRows / 64; ++c) {
      int64_t first = INT32_MAX, last = -1;
      for (int row = w.first_row + 64 * c; row < std::min(w.first_row + 64 * c + 64, w.seqlen_q);
           ++row) {
        const Columns seen = visible_columns({w.lo, w.hi}, row, w.seqlen_kv);
        if (seen.begin >= seen.end) continue;
        first = std::min(first, seen.begin), last = std::max(last, seen.end - 1);
      }
      const Range own = w.consumer_blocks[c];
      if (last < 0) continue;  // a few may be claimed that none of its rows sees
      ASSERT_EQ(own.begin, first / kCols) << "consumer " << c;
      ASSERT_EQ(own.end, last / kCols + 1) << "consumer " << c;
      ASSERT_TRUE(own.begin >= w.blocks.begin && own.end <= w.blocks.end) << "consumer " << c;
    }
    for (int c = 0; c < kRows / 64; ++c)
      most = std::max(most, w.consumer_blocks[c].end - w.consumer_blocks[c].begin);
    ASSERT_EQ(w.max_consumer_blocks, most);
    tiles.push_back(w);
  }
  ASSERT_TRUE(all_end(tiles, kRows / 64, stages));
}

TEST(HopperShares, ConsumersThatAreApartNeverWaitForEver) {
  for (uint32_t seed = 0; seed < 3000 && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    check_shares<192, 128>(seed, 2);
    check_shares<192, 128>(seed, 3);
    check_shares<256, 64>(seed, 4);
    check_shares<128, 128>(seed, 2);
    check_shares<128, 80>(seed, 2);
    check_shares<128, 64>(seed, 2);
  }
}

}  // namespace
}  // namespace tea::hopper
