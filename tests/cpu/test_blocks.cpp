// make_group and make_block: every row of a group is in exactly one block, with the columns it
// sees.
#include <gtest/gtest.h>

#include <set>

#include "cpu/blocks.h"

namespace tea::cpu {
namespace {

TEST(Blocks, CoverEveryRowOfTheGroupOnce) {
  for (const int64_t length : {0, 1, 5, 63, 64, 65, 150})
    for (const int heads : {1, 3}) {
      Problem p =
          Problem::parse("dtype=fp32 heads_kv=2 dim_qk=8 causal=1 window_left=6 bottom_right=1");
      p.heads_q = 2 * heads, p.batch = 1, p.seqlen_q = length, p.seqlen_kv = 100;
      tea::Run run{};
      run.size = geometry(p, nullptr);
      const View view(p, run);
      const Group group = make_group(view, 0, 1);
      EXPECT_EQ(group.rows(), heads * length);
      std::set<std::pair<int64_t, int64_t>> seen;
      Columns all{100, 0};  // of the group
      for (int64_t n = 0; n < group.blocks(); ++n) {
        const RowBlock block = make_block(group, n * kRows, kRows);
        for (int lane = 0; lane < block.count; ++lane) {
          EXPECT_TRUE(seen.insert({block.head[lane], block.row[lane]}).second);
          EXPECT_EQ(block.head[lane] / heads, 1);
          const Columns c = visible_columns(group.band, block.row[lane], 100);
          EXPECT_EQ(block.sees(lane), c.begin < c.end);
          EXPECT_GE(block.common.begin, block.columns[lane].begin);
          EXPECT_LE(block.common.end, block.columns[lane].end);
          if (!block.sees(lane)) continue;
          EXPECT_EQ(block.columns[lane].begin, c.begin);
          EXPECT_EQ(block.columns[lane].end, c.end);
          EXPECT_LE(block.all.begin, c.begin);
          EXPECT_GE(block.all.end, c.end);
          all = {std::min(all.begin, c.begin), std::max(all.end, c.end)};
        }
        for (int lane = block.count; lane < kRows; ++lane) EXPECT_FALSE(block.sees(lane));
      }
      EXPECT_EQ(seen.size(), static_cast<size_t>(heads * length));
      if (all.begin >= all.end) all = {0, 0};
      EXPECT_EQ(group.visible.begin, all.begin);
      EXPECT_EQ(group.visible.end, all.end);
    }
}

}  // namespace
}  // namespace tea::cpu
