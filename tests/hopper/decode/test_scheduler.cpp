// The division of key blocks among the CTAs of a decoding launch: the kernel's code compiled for
// the host, one CTA after the other.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <vector>

#include "hopper/decode/mla/config.h"
#include "hopper/decode/scheduler.cuh"

namespace tea::hopper::decode {
namespace {

KernelParams params(int batch, int heads, int keys) {
  KernelParams p{};
  p.args.is_uniform = 1, p.args.batch = batch;
  p.args.heads_q = p.args.heads_kv = heads, p.args.keys.max_seqlen = keys;
  p.bounds.seqlen_q = 1, p.bounds.seqlen_kv = keys;
  p.group = FastDivisor(1), p.page_size = FastDivisor(1);
  p.tiles = heads, p.tiles_at_once = FastDivisor(1);
  return p;
}

// A CTA's part of a tile, and the slots that the CTA adds to it.
struct Done {
  int cta;
  WorkItem item;
  OtherParts others;
};
template <BlockShape kShape, bool kIsPlain = false>
std::vector<Done> run_all(const KernelParams& p, int ctas) {
  std::vector<Done> done;
  gridDim.x = static_cast<unsigned>(ctas);
  for (int cta = 0; cta < ctas; ++cta) {
    blockIdx.x = static_cast<unsigned>(cta);
    WorkCursor<kShape, kIsPlain> work;
    work.start_uniform(p);
    if (!work.has_work()) continue;
    do done.push_back({cta, work.item, find_other_parts(p, work)});
    while (work.next(p));
  }
  return done;
}

struct Launch {
  int batch, heads, keys;
};
constexpr Launch kLaunches[] = {{1, 1, 1},      {1, 1, 0},    {3, 2, 0},     {1, 8, 1024},
                                {1, 1, 262144}, {2, 1, 9999}, {32, 8, 8192}, {128, 1, 100},
                                {7, 5, 333},    {1, 2, 40000}};
constexpr int kCtas[] = {1, 2, 13, 100, 132};

// check(launch, block shape, tiles at once, parts) for the shapes of all kernels.
template <BlockShape kShape, class Check>
void for_each_launch_of(Check&& check) {
  for (const Launch& x : kLaunches)
    for (const int ctas : kCtas) {
      SCOPED_TRACE(testing::Message()
                   << x.batch << " sequences of " << x.keys << " keys, " << x.heads << " heads, "
                   << ctas << " CTAs, blocks of " << kShape.keys);
      KernelParams p = params(x.batch, x.heads, x.keys);
      check(x, kShape, 1, run_all<kShape>(p, ctas));
      const int at_once = tiles_at_once(x.heads, ctas);
      p.tiles_at_once = FastDivisor(at_once);
      check(x, kShape, at_once, run_all<kShape>(p, ctas / at_once * at_once));
    }
}
template <class Check>
void for_each_launch(Check&& check) {
  for_each_launch_of<kBlockShape>(check);
  for_each_launch_of<mla::kBlockShape>(check);
}

TEST(DecodeScheduler, CoversEveryKeyBlockOnce) {
  for_each_launch([](const Launch& x, const BlockShape& shape, int, const std::vector<Done>& done) {
    const int blocks = tile_blocks(shape, 1, x.keys);
    std::map<std::pair<int, int>, std::vector<int>> seen;
    for (const Done& d : done) {
      EXPECT_EQ(d.item.blocks, blocks);
      EXPECT_LT(d.item.first, d.item.end);
      std::vector<int>& tile = seen[{d.item.batch, d.item.tile}];
      tile.resize(static_cast<size_t>(blocks));
      for (int i = d.item.first; i < d.item.end; ++i) ++tile.at(static_cast<size_t>(i));
    }
    EXPECT_EQ(seen.size(), static_cast<size_t>(x.batch * x.heads));
    for (const auto& [tile, counts] : seen)
      for (const int count : counts) ASSERT_EQ(count, 1);
  });
}

// Plain kernels divide keys as the others do: a launch has one of the two, and its workspace is
// planned without that choice.
TEST(DecodeScheduler, DividesKeysOfPlainKernelsAlike) {
  const auto numbers = [](const Done& d) {
    const OtherParts& o = d.others;
    std::vector<int> all = {d.cta,      d.item.batch,  d.item.tile, d.item.first,
                            d.item.end, d.item.blocks, o.count,     o.adjacent};
    for (int n = 0; n < o.count; ++n) all.push_back(o.slot(n));
    return all;
  };
  for (const Launch& x : kLaunches)
    for (const int ctas : kCtas) {
      KernelParams p = params(x.batch, x.heads, x.keys);
      const int at_once = tiles_at_once(x.heads, ctas), count = ctas / at_once * at_once;
      p.tiles_at_once = FastDivisor(at_once);
      const std::vector<Done> want = run_all<kBlockShape>(p, count);
      const std::vector<Done> got = run_all<kBlockShape, true>(p, count);
      ASSERT_EQ(got.size(), want.size());
      for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(numbers(got[i]), numbers(want[i]));
    }
}

// The MLA kernel is followed by one that adds parts, unless the host knows that there are none.
TEST(DecodeScheduler, KnowsWhetherTilesAreDivided) {
  for (const Launch& x : kLaunches)
    for (const int ctas : kCtas)
      for (const int part_blocks : {0, kInvariantKeys / mla::kBlockShape.keys}) {
        KernelParams p = params(x.batch, x.heads, x.keys);
        p.part_blocks = part_blocks;
        const int parts = std::max(1, (x.keys + kInvariantKeys - 1) / kInvariantKeys);
        const int count = part_blocks ? x.batch * x.heads * parts : ctas;
        const std::vector<Done> done = run_all<mla::kBlockShape>(p, count);
        const bool divided = std::any_of(done.begin(), done.end(), [](const Done& d) {
          return !d.item.begins_tile() || !d.item.ends_tile();
        });
        EXPECT_EQ(may_divide_tiles<mla::kBlockShape>(p, count), divided)
            << x.batch << " sequences of " << x.keys << " keys, " << x.heads << " heads, " << count;
        p.args.is_uniform = 0;
        EXPECT_EQ(may_divide_tiles<mla::kBlockShape>(p, count), count > 1);
      }
}

// The slots that a CTA adds are those of CTAs of lower numbers. A CTA of the decoding kernel waits
// for these only, so that it cannot wait for ever; a second kernel adds the parts of MLA.
TEST(DecodeScheduler, AddsEveryPartOfATileOnce) {
  for_each_launch([](const Launch&, const BlockShape&, int, const std::vector<Done>& done) {
    std::map<int, std::pair<int, int>> written;  // the tile in a CTA's slot
    for (const Done& d : done)
      if (!d.item.ends_tile()) {
        EXPECT_TRUE(written.insert({d.cta, {d.item.batch, d.item.tile}}).second);
      }
    std::map<int, int> added;
    for (const Done& d : done)
      for (int n = 0; n < d.others.count; ++n) {
        const int slot = d.others.slot(n);
        EXPECT_LT(slot, d.cta);
        const auto tile = written.find(slot);
        ASSERT_NE(tile, written.end());
        EXPECT_EQ(tile->second, std::make_pair(d.item.batch, d.item.tile));
        ++added[slot];
      }
    EXPECT_EQ(added.size(), written.size());
    for (const auto& [slot, count] : added) EXPECT_EQ(count, 1);
  });
}

// In a batch-invariant problem the parts of a tile and the order in which they are added depend on
// its keys alone; the last one is added first.
template <BlockShape kShape>
void expect_parts_by_keys_alone() {
  struct Part {
    int first, end;
    std::vector<int> added;  // the first blocks of the parts whose slots are added
    bool operator==(const Part&) const = default;
  };
  const auto parts_of_last_tile = [](int batch, int heads, int keys) {
    KernelParams p = params(batch, heads, keys);
    p.part_blocks = kInvariantKeys / kShape.keys;
    const int parts = std::max(1, (keys + kInvariantKeys - 1) / kInvariantKeys);
    const std::vector<Done> done = run_all<kShape>(p, batch * heads * parts);
    EXPECT_EQ(done.size(), static_cast<size_t>(batch * heads * parts));
    std::vector<Part> found;
    for (const Done& d : done) {
      if (d.item.batch != batch - 1 || d.item.tile != heads - 1) continue;
      Part part{d.item.first, d.item.end, {}};
      for (int n = 0; n < d.others.count; ++n)
        part.added.push_back(done.at(static_cast<size_t>(d.others.slot(n))).item.first);
      found.push_back(part);
    }
    return found;
  };
  for (const int keys : {0, 1, 1024, 1025, 9999, 12288, 12289, 40000, 262144}) {
    SCOPED_TRACE(keys);
    const std::vector<Part> alone = parts_of_last_tile(1, 1, keys);
    EXPECT_EQ(parts_of_last_tile(5, 3, keys), alone);
    // A longer tile adds the same complete groups, in the same order.
    const std::vector<int> few = alone.back().added;
    const std::vector<int> many = parts_of_last_tile(1, 1, keys + 30000).back().added;
    EXPECT_TRUE(std::is_sorted(few.rbegin(), few.rend()));
    EXPECT_TRUE(std::is_sorted(many.rbegin(), many.rend()));
    const int group = kShape.group_parts * kInvariantKeys / kShape.keys;  // blocks of a group
    const int own_group = alone.back().first / group;
    for (const int first : few) {
      if (first / group == own_group) continue;
      EXPECT_NE(std::find(many.begin(), many.end(), first), many.end()) << first;
    }
  }
}

TEST(DecodeScheduler, DividesTilesOfInvariantProblemsByTheirKeysAlone) {
  expect_parts_by_keys_alone<kBlockShape>();
  expect_parts_by_keys_alone<mla::kBlockShape>();
}

TEST(DecodeScheduler, GivesEveryCtaAboutTheSame) {
  for_each_launch(
      [](const Launch& x, const BlockShape& shape, int at_once, const std::vector<Done>& done) {
        std::map<int, int> share;
        for (const Done& d : done) share[d.cta] += d.item.end - d.item.first;
        const int all = x.batch * x.heads * tile_blocks(shape, 1, x.keys);
        const int count = static_cast<int>(share.size());
        const int of_group = all / at_once;  // blocks of the heads that have CTAs of their own
        EXPECT_LE(count, (of_group + shape.min_share - 1) / shape.min_share * at_once);
        for (const auto& [cta, blocks] : share) {
          EXPECT_GE(blocks, all / count);
          EXPECT_LE(blocks, all / count + 1);
        }
      });
}

TEST(DecodeScheduler, AddsManyPartsInTwoLevels) {
  for (const Done& d : run_all<kBlockShape>(params(1, 1, 262144), 132))
    EXPECT_LE(d.others.count, kBlockShape.group_parts);
}

TEST(DecodeScheduler, TakesTilesAtOnceThatOccupyMostCtas) {
  EXPECT_EQ(tiles_at_once(8, 132), 8);
  EXPECT_EQ(tiles_at_once(1, 132), 1);
  EXPECT_EQ(tiles_at_once(40, 132), 10);  // 20 and 40 occupy 120
  EXPECT_EQ(tiles_at_once(131, 132), 131);
  EXPECT_EQ(tiles_at_once(262, 132), 131);
  EXPECT_EQ(tiles_at_once(48, 132), 16);
  EXPECT_EQ(tiles_at_once(7, 3), 1);
}

TEST(DecodeScheduler, SharesWholeTilesWhereThatLeavesFewCtasWithoutWork) {
  EXPECT_EQ(even_shares(128, 132), 128);
  EXPECT_EQ(even_shares(256, 132), 128);
  EXPECT_EQ(even_shares(1, 132), 132);
  EXPECT_EQ(even_shares(2, 131), 130);
  EXPECT_EQ(even_shares(100, 132), 132);  // 100 would leave 32 without work
  EXPECT_EQ(even_shares(0, 132), 132);
}

// The workspace has a slot for each CTA of a launch, whatever the number of SMs is.
TEST(DecodeScheduler, PlansASlotForEveryCta) {
  AttentionArguments a{};
  for (const Launch& x : kLaunches) {
    a.batch = x.batch, a.keys.max_seqlen = x.keys;
    for (int sms = 1; sms <= kMaxCtas; ++sms)
      EXPECT_LE(num_ctas(kBlockShape, a, x.heads, tiles_at_once(x.heads, sms), sms),
                most_ctas(kBlockShape, a, x.heads));
  }
}

}  // namespace
}  // namespace tea::hopper::decode
