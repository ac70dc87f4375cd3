// The tiles of the backward pass, from the scheduler's code compiled for the host: every pair of a
// row and a key that attention has is in one step of one tile, and the contributions to a row block
// are numbered without a gap, which ordered accumulation needs in order to end.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "hopper/backward/interleaving.h"
#include "hopper/backward/work_tile.cuh"
#include "hopper/forward/tile_order.cuh"

namespace tea::hopper::backward {
namespace {

TileParams random_params(std::mt19937& generator, int parts) {
  const auto between = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(generator);
  };
  TileParams p{};
  AttentionArguments& a = p.args;
  a.batch = 1, a.heads_q = 4 * parts, a.heads_kv = 2, a.dim_qk = a.dim_v = 64;
  a.queries.max_seqlen = between(1, 1100), a.keys.max_seqlen = between(1, 1100);
  a.mask = {between(0, 1), between(0, 1), between(0, 1) ? between(1, 600) : 0,
            between(0, 1) ? between(1, 600) : 0};
  for (int64_t& o : a.origin) o = between(0, 1) ? between(0, 300) : 0;
  a.shift = between(0, 1) ? between(-300, 300) : 0;
  p.work = make_workspace(a, 0, nullptr);
  p.parts = FastDivisor(parts);
  p.heads_per_tile = a.heads_q / (a.heads_kv * parts);
  p.descending_heads = between(0, 1);
  return p;
}

// The pairs of a row block and a key block that have a visible pair of a row and a key, by
// definition.
template <int kBlockM>
std::set<std::pair<int, int>> visible_blocks(const SequenceBounds& b) {
  std::set<std::pair<int, int>> blocks;
  for (int row = 0; row < b.rows; ++row) {
    const Columns keys = visible_columns({b.lo, b.hi}, row, b.keys);
    for (int64_t key = keys.begin; key < keys.end; ++key)
      blocks.insert({row / kBlockM, static_cast<int>(key) / kBlockN});
  }
  return blocks;
}

template <int kBlockM>
void check(uint32_t seed) {
  std::mt19937 generator(seed);
  const TileParams p = random_params(generator, 1 << generator() % 3);
  const SequenceBounds bounds = bounds_of<kBlockM>(p, 0);
  const auto expected = visible_blocks<kBlockM>(bounds);
  ASSERT_EQ(expected.empty(), bounds.keys == 0);

  std::set<std::pair<int, int>> found;
  std::map<int, int> next_rank;  // of a row block
  const int blocks = (bounds.keys + kBlockN - 1) / kBlockN;
  for (int i = 0; i < blocks; ++i) {
    const int j = p.is_descending(0, 0) ? blocks - 1 - i : i;
    WorkTile w{};
    describe<kBlockM>(w, p, bounds, {j, 0, 0});
    ASSERT_LT(w.row_blocks.begin, w.row_blocks.end) << "key block " << j;
    for (int m = w.row_blocks.begin; m < w.row_blocks.end; ++m) {
      found.insert({m, j});
      const Range keys = w.visible_key_blocks(m * kBlockM, kBlockM);
      ASSERT_EQ(w.rank_among(keys), next_rank[m]++) << "key block " << j << ", row block " << m;
      ASSERT_LT(j, keys.end);
    }
  }
  ASSERT_EQ(found, expected);
  WorkTile w{};
  for (const auto& [m, contributions] : next_rank) {
    describe<kBlockM>(w, p, bounds, {0, 0, 0});
    const Range keys = w.visible_key_blocks(m * kBlockM, kBlockM);
    ASSERT_EQ(contributions, keys.end - keys.begin) << "row block " << m;
  }
}

TEST(HopperBackwardTiles, CoverEveryVisiblePairAndNumberContributionsWithoutGaps) {
  for (uint32_t seed = 0; seed < 300 && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    check<64>(seed);
    check<128>(seed);
  }
}

// The (head, key block) of all tiles of `batch` sequences of `blocks` key blocks, in the order of
// their numbers: by TileOrder if sequences are dense, else as SchedulerWarp finds them.
std::vector<std::pair<int, int>> numbered_tiles(const Interleaving& x, int heads, int batch,
                                                int blocks, bool dense) {
  std::vector<std::pair<int, int>> tiles;
  const auto add = [&](int head, int row_block) {
    tiles.emplace_back(head, head < x.descending_heads ? row_block : blocks - 1 - row_block);
  };
  const auto add_all = [&](const TileOrder& order, int first_head) {
    for (int i = 0; i < order.count(); ++i) {
      const tea::hopper::TileIndex t = order.at(i);
      add(first_head + t.batch * order.heads + t.head, t.row_block);
    }
  };
  const TileOrder all = {blocks, heads, batch, x.heads_at_once, true};
  const int together = all.sequences_at_once();
  if (dense) {
    add_all(all, 0);
  } else if (together == 1) {
    for (int b = 0; b < batch; ++b)
      add_all({blocks, heads, 1, std::min(heads, x.heads_at_once), true}, b * heads);
  } else {
    for (int first = 0; first < batch; first += together)
      for (int block = blocks - 1; block >= 0; --block)
        for (int b = first; b < std::min(first + together, batch); ++b)
          for (int head = 0; head < heads; ++head) add(b * heads + head, block);
  }
  return tiles;
}

// Otherwise ordered accumulation could deadlock: a tile waits for the contributions to dQ before
// its own, and for those to dK and dV of the parts of its key head before its own.
TEST(HopperBackwardTiles, WaitForTilesOfLowerNumbersOnly) {
  std::mt19937 generator(11);
  int descending = 0, divided = 0;
  for (int trial = 0; trial < 4000; ++trial) {
    AttentionArguments a{};
    a.batch = 1 + static_cast<int>(generator() % 20);
    a.heads_kv = 1 + static_cast<int>(generator() % 9);
    a.heads_q = a.heads_kv * (1 + static_cast<int>(generator() % 16));
    a.dim_qk = a.dim_v = 128;
    a.queries.max_seqlen = 1 + static_cast<int>(generator() % 6000);
    a.keys.max_seqlen = 1 + static_cast<int>(generator() % 2000);
    a.keys.form = generator() % 2 ? TEA_DENSE : TEA_RAGGED;
    a.keys.tokens = a.keys.max_seqlen * a.batch;
    a.mask.causal = generator() % 4 > 0;
    const int parts = group_parts(a), heads = a.heads_kv * parts;
    const Interleaving x = interleave(a, static_cast<int>(generator() % kNumTiles), parts);
    descending += x.descending_heads > 0, divided += x.descending_heads > 0 && parts > 1;
    const int blocks = static_cast<int>((a.keys.max_seqlen + kBlockN - 1) / kBlockN);
    const auto batch = static_cast<int>(a.batch);
    std::map<std::pair<int, int>, int> numbers;
    for (const auto& tile : numbered_tiles(x, heads, batch, blocks, a.keys.form == TEA_DENSE)) {
      const int number = static_cast<int>(numbers.size());
      ASSERT_TRUE(numbers.insert({tile, number}).second);
      const auto& [head, block] = tile;
      const int before = head < x.descending_heads ? block + 1 : block - 1;
      if (before >= 0 && before < blocks) {
        ASSERT_TRUE(numbers.contains({head, before})) << "trial " << trial;
      }
      if (head % parts > 0) {
        ASSERT_TRUE(numbers.contains({head - 1, block})) << "trial " << trial;
      }
    }
    ASSERT_EQ(numbers.size(), static_cast<size_t>(heads * batch * blocks));
  }
  EXPECT_GT(descending, 100);
  EXPECT_GT(divided, 100);
}

TEST(HopperBackwardTiles, GiveEveryQueryHeadToOneTileOfAKeyBlock) {
  for (const int parts : {1, 2, 4}) {
    std::mt19937 generator(7);
    const TileParams p = random_params(generator, parts);
    SequenceBounds bounds{};
    bounds.rows = bounds.keys = 64, bounds.hi = 64, bounds.lo = -64;
    std::vector<int> tiles(static_cast<size_t>(p.args.heads_q));
    for (int t = 0; t < p.args.heads_kv * parts; ++t) {
      WorkTile w{};
      describe<64>(w, p, bounds, {0, t, 0});
      for (int head = w.first_head; head < w.last_head; ++head) {
        ++tiles[static_cast<size_t>(head)];
        EXPECT_EQ(w.head_kv, head / (p.args.heads_q / p.args.heads_kv));
      }
    }
    EXPECT_EQ(std::ranges::count(tiles, 1), p.args.heads_q) << parts << " parts";
  }
}

// Groups are divided where there are few tiles, so that a short run may need memory that a long one
// does not use. What is reserved for the long one must serve it.
TEST(HopperBackwardTiles, AShortRunNeedsNoMoreMemoryThanALongOne) {
  for (const auto& [ragged, heads_kv] : {std::pair{false, 8}, {true, 8}, {false, 4}, {true, 4}}) {
    uint64_t before = 0;
    int divided = 0, whole = 0;
    for (int rows = 1; rows <= 9000; rows += 37) {
      AttentionArguments a{};
      a.batch = 3, a.heads_q = 16, a.heads_kv = heads_kv, a.dim_qk = a.dim_v = 128;
      a.queries.max_seqlen = a.keys.max_seqlen = rows;
      a.queries.tokens = a.keys.tokens = 3 * rows;
      if (ragged) a.queries.form = a.keys.form = TEA_RAGGED;
      const Workspace w = make_workspace(a, 1, nullptr);
      ASSERT_GE(w.bytes, before) << rows << " rows";
      before = w.bytes;
      const int parts = group_parts(a);
      ++(parts > 1 ? divided : whole);
      if (parts > 1) {
        ASSERT_GE(accumulated_key_blocks(a, w.key_blocks), w.key_blocks.per_head * a.heads_kv);
      }
    }
    EXPECT_GT(divided, 0);
    EXPECT_EQ(whole > 0, heads_kv == 8) << "groups of more than two heads are always divided";
  }
}

// A tile that stores the first sums of a row block where another head had its own waits for the
// conversion of these, and so for all tiles of that head. Its number must be higher than theirs.
TEST(HopperBackwardTiles, HeadsThatShareMemoryForTheirSumsAreVisitedLast) {
  std::mt19937 generator(13);
  int shared = 0;
  for (int trial = 0; trial < 4000; ++trial) {
    AttentionArguments a{};
    a.batch = 1 + static_cast<int>(generator() % 40);
    a.heads_kv = 1 + static_cast<int>(generator() % 40);
    a.heads_q = a.heads_kv * (1 + static_cast<int>(generator() % 16));
    a.dim_qk = a.dim_v = 128;
    a.queries.max_seqlen = 1 + static_cast<int>(generator() % (generator() % 2 ? 6000 : 128));
    a.keys.max_seqlen = 1 + static_cast<int>(generator() % 1500);
    a.mask.causal = generator() % 2;
    const int tile = static_cast<int>(generator() % kNumTiles), parts = group_parts(a);
    const Workspace w = make_workspace(a, tile, nullptr);
    if (w.dq_heads == 0) continue;
    ++shared;
    const int heads = a.heads_kv * parts, per_tile = a.heads_q / heads;
    const int blocks = static_cast<int>((a.keys.max_seqlen + kBlockN - 1) / kBlockN);
    const auto tiles =
        numbered_tiles(interleave(a, tile, parts), heads, static_cast<int>(a.batch), blocks, true);
    const int all = static_cast<int>(a.batch) * heads;
    std::vector<size_t> first(static_cast<size_t>(all), tiles.size()), last(first.size(), 0);
    for (size_t i = 0; i < tiles.size(); ++i) {
      const auto head = static_cast<size_t>(tiles[i].first);
      first[head] = std::min(first[head], i), last[head] = std::max(last[head], i);
    }
    for (int n = w.dq_heads; n < all * per_tile; ++n) {
      ASSERT_LT(n - w.dq_heads, w.dq_heads);
      ASSERT_GT(first[static_cast<size_t>(n / per_tile)],
                last[static_cast<size_t>((n - w.dq_heads) / per_tile)]);
    }
  }
  EXPECT_GT(shared, 1000);
}

// Where tiles wait for single tasks of the preprocess kernel, they wait for those that write the
// terms of their heads, in whole groups of four flags, and all tasks have flags.
TEST(HopperBackwardTiles, WaitForTheTasksThatWriteTheirTerms) {
  std::mt19937 generator(17);
  int single = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    AttentionArguments a{};
    a.batch = 1 + static_cast<int>(generator() % 20);
    a.heads_kv = 1 + static_cast<int>(generator() % 20);
    a.heads_q = a.heads_kv * (1 + static_cast<int>(generator() % 6));
    a.dim_qk = a.dim_v = 8 * (1 + static_cast<int>(generator() % 16));
    a.queries.max_seqlen = 1 + static_cast<int>(generator() % 1500);
    a.keys.max_seqlen = 1 + static_cast<int>(generator() % 1500);
    const int tile = find_tile(a.dim_qk, a.dim_v), block_m = kTiles[tile].block_m;
    const int per_tile = a.heads_q / (a.heads_kv * group_parts(a));
    const TermTasks t = term_tasks(a, block_m, per_tile);
    ASSERT_EQ(t.chunk_heads(), 32 / t.team * kHeadsPerTeam);
    ASSERT_GE(t.team * 8, a.dim_v);
    ASSERT_GE(t.chunks * t.chunk_heads(), a.heads_q);
    if (t.per_chunk == 0) continue;
    ++single;
    const int padded = static_cast<int>((a.queries.max_seqlen + block_m - 1) / block_m) * block_m;
    ASSERT_EQ(tasks_with_terms(static_cast<int>(a.queries.max_seqlen), block_m) * kTermRows,
              padded);
    ASSERT_EQ(t.per_chunk % 4, 0);
    ASSERT_GE(t.per_chunk * kTermRows, padded + block_m - 1);  // and gradients to be zeroed
    ASSERT_LE(t.task_of(static_cast<int>(a.batch), 0, 0), term_flags(a, block_m));
    for (int head = 0; head < a.heads_q; head += per_tile) {
      const int last = head + per_tile - 1, sequence = static_cast<int>(generator() % a.batch);
      ASSERT_EQ(t.task_of(sequence, head, 0), t.task_of(sequence, last, 0));
      const int chunk =
          t.task_of(sequence, head, 0) / t.per_chunk;  // as the preprocess kernel has it
      ASSERT_EQ(chunk / t.chunks, sequence);
      const int first_head = (chunk - sequence * t.chunks) << t.chunk_shift;
      ASSERT_LE(first_head, head);
      ASSERT_LT(last, first_head + t.chunk_heads());
    }
  }
  EXPECT_GT(single, 500);
}

// The work of the warps of a grid on `count` tasks, by the code of the preprocess kernel: all rows
// of all tasks once, a shared task by a group of kSharers warps, which one CTA has, and no task
// before one of a lower number in an earlier round. Few tasks take no more rounds than they need.
void check_rounds(int count, int warps) {
  constexpr int kSharers = TermRounds::kSharers;
  const TermRounds rounds(count, warps);
  const auto size = static_cast<size_t>(count);
  std::vector<uint32_t> rows_done(size), mask(size);
  std::vector<int> group(size, -1), lowest, highest;  // of each round
  int most_rows = 0;
  for (int warp = 0; warp < warps; ++warp) {
    int rows = 0, round = 0;
    for (; rounds.share(round, warp).task < count; ++round) {
      const TermRounds::Share share = rounds.share(round, warp);
      ASSERT_GE(share.task, 0);
      const auto task = static_cast<size_t>(share.task);
      ASSERT_GT(share.rows, 0);
      ASSERT_LE(share.first_row + share.rows, kTermRows);
      const uint32_t mine = ((1u << share.rows) - 1) << share.first_row;
      ASSERT_EQ(mask[task] & mine, 0u) << "task " << task;
      mask[task] |= mine, rows += share.rows;
      ASSERT_TRUE(group[task] < 0 || group[task] == warp / kSharers) << "task " << task;
      group[task] = warp / kSharers;
      ASSERT_FALSE(TermRounds::is_complete(rows_done[task]));
      rows_done[task] += static_cast<uint32_t>(share.rows);
      ASSERT_EQ(TermRounds::is_complete(rows_done[task]), mask[task] == (1u << kTermRows) - 1);
      if (lowest.size() == static_cast<size_t>(round))
        lowest.push_back(count), highest.push_back(-1);
      int &low = lowest[static_cast<size_t>(round)], &high = highest[static_cast<size_t>(round)];
      low = std::min(low, share.task), high = std::max(high, share.task);
    }
    most_rows = std::max(most_rows, rows);
    // The lanes of a warp look for tasks up to 32 rounds further on.
    for (int i = 0; i < 32; ++i) ASSERT_GE(rounds.share(round + i, warp).task, count);
  }
  ASSERT_EQ(std::ranges::count(rows_done, uint32_t{kTermRows}), count);
  for (size_t round = 1; round < lowest.size(); ++round)
    ASSERT_GT(lowest[round], highest[round - 1]);
  const int groups = warps / kSharers, shared = 2 * TermRounds::kSharedRows;
  if (count <= warps) {
    ASSERT_EQ(lowest.size(), count == 0 ? 0u : groups < count && count <= 2 * groups ? 2u : 1u);
    ASSERT_EQ(most_rows, count == 0            ? 0
                         : count <= groups     ? shared / 2
                         : count <= 2 * groups ? shared
                                               : kTermRows);
  } else {
    ASSERT_LE(most_rows, (count + warps - 1) / warps * kTermRows + shared);
    for (int i = 0; i < 2 * groups; ++i)
      ASSERT_EQ(rounds.share(i / groups, i % groups * kSharers).task, i);
    ASSERT_EQ(rounds.share(1, 0).rows, TermRounds::kSharedRows);
  }
}
TEST(HopperBackwardTiles, EveryRowOfATaskIsDoneOnceOnEveryGrid) {
  for (const int warps : {4, 16, 32, 48, 112})
    for (int count = 0; count <= 6 * warps + 1 && !HasFatalFailure(); ++count) {
      SCOPED_TRACE(std::to_string(count) + " tasks, " + std::to_string(warps) + " warps");
      check_rounds(count, warps);
    }
  std::mt19937 generator(19);
  for (int trial = 0; trial < 300 && !HasFatalFailure(); ++trial) {
    const int warps = 16 * (1 + static_cast<int>(generator() % 132));
    const int count = static_cast<int>(generator() % 20000);
    SCOPED_TRACE(std::to_string(count) + " tasks, " + std::to_string(warps) + " warps");
    check_rounds(count, warps);
  }
}

// Sequences of a ragged tensor share no task for which tiles wait, and all of these have words.
TEST(HopperBackwardTiles, RaggedSequencesShareNoTasks) {
  std::mt19937 generator(29);
  for (int trial = 0; trial < 300; ++trial) {
    AttentionArguments a{};
    a.batch = 8 + static_cast<int>(generator() % 30);
    a.heads_q = a.heads_kv = 1 + static_cast<int>(generator() % 40);
    a.dim_qk = a.dim_v = 8 * (1 + static_cast<int>(generator() % 16));
    std::vector<int32_t> cu = {0};
    for (int b = 0; b < a.batch; ++b)
      cu.push_back(cu.back() + static_cast<int32_t>(generator() % 400) * (generator() % 4 != 0));
    a.queries.form = a.keys.form = TEA_RAGGED;
    a.queries.cu_seqlens = a.keys.cu_seqlens = cu.data();
    a.queries.tokens = a.keys.tokens = cu.back();
    a.queries.max_seqlen = a.keys.max_seqlen = 400;
    const int block_m = kTiles[find_tile(a.dim_qk, a.dim_v)].block_m;
    const TermTasks t = term_tasks(a, block_m, 1);
    ASSERT_GT(t.per_chunk, 0);
    ASSERT_EQ(t.per_block * kTermRows, block_m);
    ASSERT_LE(int64_t{t.chunks} * t.per_chunk, term_flags(a, block_m));
    const Blocks blocks = make_blocks(a.queries, block_m, a.batch);
    int end = 0;  // of the tasks of the sequences before, in the first chunk
    for (int b = 0; b < static_cast<int>(a.batch); ++b) {
      const int rows = cu[static_cast<size_t>(b) + 1] - cu[static_cast<size_t>(b)];
      const auto block = static_cast<int>(blocks.first(a.queries, block_m, b, rows));
      const int first = t.task_of(b, 0, block), last = a.heads_q - 1;
      ASSERT_EQ(first % 4, 0);  // words are read by fours
      ASSERT_GE(first, end);
      end = first + tasks_with_terms(rows, block_m);
      ASSERT_EQ(t.task_of(b, last, block), first + last / t.chunk_heads() * t.per_chunk);
    }
    ASSERT_LE(end, t.per_chunk);
  }
}

// Sequences of a ragged tensor share no block, whatever their lengths are.
TEST(HopperBackwardTiles, BlocksOfRaggedSequencesAreDisjoint) {
  std::mt19937 generator(3);
  for (int trial = 0; trial < 200; ++trial) {
    const int batch = 1 + static_cast<int>(generator() % 9);
    std::vector<int32_t> cu = {0};
    for (int b = 0; b < batch; ++b)
      cu.push_back(cu.back() + static_cast<int32_t>(generator() % 400) * (generator() % 4 != 0));
    SequenceLayout layout{};
    layout.form = TEA_RAGGED, layout.cu_seqlens = cu.data();
    layout.tokens = cu.back() + static_cast<int64_t>(generator() % 70), layout.max_seqlen = 400;
    for (const int block : {64, 128}) {
      const Blocks blocks = make_blocks(layout, block, batch);
      int64_t free = 0;
      for (int b = 0; b < batch; ++b) {
        const int64_t length = cu[static_cast<size_t>(b) + 1] - cu[static_cast<size_t>(b)];
        if (length == 0) continue;
        const int64_t first = blocks.first(layout, block, b, length);
        ASSERT_GE(first, free);
        free = first + (length + block - 1) / block;
      }
      ASSERT_LE(free, blocks.per_head);
    }
  }
}

}  // namespace
}  // namespace tea::hopper::backward
