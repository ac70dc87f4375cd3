// schedule: every row of every group is in one piece, every key that a block sees in one of its
// parts, and slots follow the keys.
#include <gtest/gtest.h>

#include "cpu/schedule.h"

namespace tea::cpu {
namespace {

// A problem, and its groups.
struct Drawn {
  explicit Drawn(const std::string& line) : p(Problem::parse(line)) {}
  tea::Run run_of() {
    tea::Run out{};
    out.tensor[TEA_RNG_STATE] = rng;
    out.size = geometry(p, nullptr);
    return out;
  }
  const Problem p;
  int64_t rng[2] = {};
  const tea::Run run = run_of();
  const View view{p, run};
  const std::vector<Group> groups = make_groups(view);
};

void expect_complete(const std::string& line, bool few) {
  const Drawn drawn(line);
  const Schedule work = schedule(drawn.view, drawn.groups, few);
  std::vector<std::vector<Part>> parts(work.pieces.size());
  for (const Part& part : work.parts) parts[static_cast<size_t>(part.piece)].push_back(part);
  int64_t slots = 0, rows = 0;
  for (size_t i = 0; i < work.pieces.size(); ++i) {
    const Piece& piece = work.pieces[i];
    const RowBlock block = make_block(*piece.group, piece.first, kRows);
    rows += block.count;
    EXPECT_EQ(static_cast<int64_t>(parts[i].size()), piece.parts);
    EXPECT_EQ(piece.first_slot, piece.parts > 1 ? slots : -1);
    int64_t next = block.all.begin;
    for (const Part& part : parts[i]) {
      EXPECT_EQ(part.slot, piece.parts == 1 ? -1 : slots++);
      EXPECT_LE(part.columns.begin, next);
      EXPECT_TRUE(piece.parts == 1 || part.columns.begin == next);
      next = part.columns.end;
    }
    EXPECT_TRUE(block.all.begin >= block.all.end || next >= block.all.end) << line;
  }
  EXPECT_EQ(slots, work.slots);
  EXPECT_EQ(rows, drawn.p.batch * drawn.p.heads_q * drawn.p.seqlen_q) << line;
}

TEST(Schedule, CoversRowsAndKeysOnce) {
  for (const char* mask : {"", "causal=1", "causal=1 bottom_right=1",
                           "window_left=700 window_right=3 bottom_right=1", "window_left=40"})
    for (const char* sizes :
         {"seqlen_q=1 seqlen_kv=100000", "seqlen_q=5 seqlen_kv=513", "seqlen_q=300 seqlen_kv=20000",
          "seqlen_q=130 seqlen_kv=64", "seqlen_q=0 seqlen_kv=9", "seqlen_q=2000 seqlen_kv=1"})
      for (const bool few : {true, false})
        expect_complete(
            "dtype=fp32 heads_q=6 heads_kv=2 dim_qk=8 batch=2 " + std::string(sizes) + " " + mask,
            few);
}

struct Counts {
  int64_t parts, slots, of_first;
};
Counts counts(const std::string& line, bool few) {
  const Drawn drawn(line);
  const Schedule work = schedule(drawn.view, drawn.groups, few);
  return {static_cast<int64_t>(work.parts.size()), work.slots, work.pieces[0].parts};
}

TEST(Schedule, CutsLongKeysOfFewRowsIntoManyParts) {
  const Drawn drawn("dtype=bf16 heads_q=8 heads_kv=2 dim_qk=8 batch=1 seqlen_q=1 seqlen_kv=65536");
  const Schedule work = schedule(drawn.view, drawn.groups, true);
  ASSERT_EQ(work.pieces.size(), 2u);
  EXPECT_EQ(work.pieces[0].parts, 32);
  EXPECT_EQ(work.parts[0].columns.begin, work.parts[1].columns.begin);  // of both heads
}

TEST(Schedule, LeavesManyBlocksWhole) {
  const Counts found = counts(
      "dtype=bf16 heads_q=16 heads_kv=16 dim_qk=8 batch=1 seqlen_q=2048 seqlen_kv=2048 causal=1",
      false);
  EXPECT_EQ(found.slots, 0);
  EXPECT_EQ(found.parts, 512);
}

// A tile of fp8 is cast with the row's maximum over all keys.
TEST(Schedule, KeepsTheKeysOfFp8TilesTogether) {
  const std::string sizes = " heads_q=1 heads_kv=1 dim_qk=8 batch=1 seqlen_q=64 seqlen_kv=65536";
  EXPECT_EQ(counts("dtype=e4m3" + sizes, false).slots, 0);
  EXPECT_EQ(counts("dtype=e4m3" + sizes, true).slots, 64);
  EXPECT_EQ(counts("dtype=bf16" + sizes, false).slots, 64);
}

TEST(Schedule, HasNotTooManyParts) {
  EXPECT_LE(counts("dtype=bf16 heads_q=8 heads_kv=8 dim_qk=8 batch=1 seqlen_q=1 "
                   "seqlen_kv=1000000000",
                   true)
                .slots,
            1024 + 8);
}

TEST(Schedule, FewRowsAreSixteenWithoutDropout) {
  const auto few = [](const std::string& options) {
    const Drawn drawn("dtype=bf16 heads_kv=1 dim_qk=8 batch=1 seqlen_kv=900 " + options);
    return is_few(drawn.view, drawn.groups[0]);
  };
  EXPECT_TRUE(few("heads_q=1 seqlen_q=1"));
  EXPECT_TRUE(few("heads_q=8 seqlen_q=2"));
  EXPECT_FALSE(few("heads_q=17 seqlen_q=1"));
  EXPECT_FALSE(few("heads_q=1 seqlen_q=1 training=1 dropout=0.5"));
}

}  // namespace
}  // namespace tea::cpu
