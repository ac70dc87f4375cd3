// cp_schedule by brute force: for every strategy, mask, number of ranks and a set of lengths, the
// parts of all ranks cover every visible pair exactly once, and whatever a part reads is local or
// has arrived. The visibility of a pair and the rows of a rank are written out here again.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

#include "core/cp_schedule.h"
#include "core/error.h"

namespace tea {
namespace {

struct Mask {
  const char* name;
  int32_t causal, bottom_right;
  int64_t left, right;  // inclusive; -1: none
};
constexpr Mask kMasks[] = {{"full", 0, 0, -1, -1},          {"causal", 1, 0, -1, -1},
                           {"causal_br", 1, 1, -1, -1},     {"window", 0, 0, 9, 4},
                           {"causal_window", 1, 0, 20, -1}, {"window_br", 0, 1, 33, 0},
                           {"right", 0, 0, -1, 3},          {"diagonal", 1, 0, 0, -1}};

tea_cp_shape shape_of(int32_t world, int32_t strategy, int32_t sharding, const Mask& mask,
                      int64_t q, int64_t kv) {
  tea_cp_shape s{};
  s.struct_size = sizeof s;
  s.world = world, s.strategy = strategy, s.sharding = sharding;
  s.causal = mask.causal, s.bottom_right = mask.bottom_right;
  s.window_left = mask.left + 1, s.window_right = mask.right + 1;
  s.seqlen_q = q, s.seqlen_kv = kv;
  return s;
}

bool sees(const tea_cp_shape& s, int64_t row, int64_t col) {
  const int64_t ahead = col - row - (s.bottom_right ? s.seqlen_kv - s.seqlen_q : 0);
  return (!s.causal || ahead <= 0) && (!s.window_left || ahead >= -(s.window_left - 1)) &&
         (!s.window_right || ahead <= s.window_right - 1);
}

// Positions of the rows that `ranks` consecutive ranks from `first` on hold together: first the
// lower chunks in order, then with zigzag the upper ones.
std::vector<int64_t> rows_of(const tea_cp_shape& s, int32_t first, int32_t ranks, int64_t length) {
  const int64_t chunks = s.sharding == TEA_CP_ZIGZAG ? 2 * s.world : s.world;
  int64_t size = length / chunks;
  if (length % chunks) size = (length / chunks + 16) / 16 * 16;
  std::vector<int64_t> out;
  const auto add = [&](int64_t chunk) {
    for (int64_t i = chunk * size; i < (chunk + 1) * size && i < length; ++i) out.push_back(i);
  };
  for (int32_t r = first; r < first + ranks; ++r) add(r);
  if (s.sharding == TEA_CP_ZIGZAG)
    for (int32_t r = first + ranks - 1; r >= first; --r) add(2 * s.world - 1 - r);
  return out;
}

// All ranks of one shape.
class World {
 public:
  explicit World(const tea_cp_shape& s) : s_(s) {
    group_ = s.strategy == TEA_CP_ALL_TO_ALL ? s.world : std::max(s.inner, 1);
    for (int32_t r = 0; r < s.world; ++r) {
      tea_cp_shape mine = s;
      mine.rank = r;
      ranks_.push_back(cp_schedule(mine));
    }
  }
  void check() {
    check_moves();
    for (int32_t r = 0; r < s_.world; ++r) check_rank(r);
    // Members of a group compute the same pairs, each for other heads.
    const int64_t pairs = s_.seqlen_q * s_.seqlen_kv;
    for (int64_t i = 0; i < pairs; ++i) {
      const bool seen = sees(s_, i / s_.seqlen_kv, i % s_.seqlen_kv);
      ASSERT_EQ(covered_[i], seen ? group_ : 0) << i / s_.seqlen_kv << "," << i % s_.seqlen_kv;
    }
  }
  const std::vector<CpSchedule>& ranks() const { return ranks_; }

 private:
  std::vector<int64_t> shard(int32_t member, int64_t length) const {
    auto rows = rows_of(s_, member * group_, group_, length);
    if (group_ == s_.world) std::ranges::sort(rows);
    return rows;
  }

  // Every move has one sender and one receiver, who list it alike; none is empty.
  void check_moves() const {
    std::multiset<std::vector<int64_t>> sent, received;
    for (int32_t r = 0; r < s_.world; ++r)
      for (const tea_cp_move& m : ranks_[r].moves) {
        ASSERT_NE(m.from, m.to);
        ASSERT_GT(m.count, 0);
        ASSERT_TRUE(m.from == r || m.to == r);
        (m.from == r ? sent : received).insert({m.step, m.from, m.to, m.owner, m.begin, m.count});
      }
    EXPECT_EQ(sent, received);
  }

  void check_rank(int32_t r) {
    const int32_t me = r / group_;
    const std::vector<int64_t> q = shard(me, s_.seqlen_q);
    std::map<std::pair<int32_t, int64_t>, int32_t> written;  // (launch, row of O)
    int32_t step = 0;
    for (const tea_cp_part& p : ranks_[r].parts) {
      ASSERT_GE(p.step, step);
      step = p.step;
      const std::vector<int64_t> kv = keys_of(p);
      check_reads(r, p);
      int64_t visible = 0;
      for (int64_t i = 0; i < p.q_count; ++i) {
        ASSERT_EQ((++written[{p.launch, p.q_begin + i}]), 1) << "two parts of a launch write a row";
        for (int64_t j = 0; j < p.kv_count; ++j) {
          const int64_t row = q.at(p.q_begin + i), col = kv.at(p.kv_begin + j);
          const int64_t ahead = j + p.origin_col - i - p.origin_row - p.shift;
          const bool shown = !p.masked || ((!s_.causal || ahead <= 0) &&
                                           (!s_.window_left || ahead >= 1 - s_.window_left) &&
                                           (!s_.window_right || ahead < s_.window_right));
          ASSERT_EQ(shown, sees(s_, row, col)) << row << "," << col;
          if (s_.positions) {
            ASSERT_EQ(row, p.origin_row + i);
            ASSERT_EQ(col, p.origin_col + j);
          }
          visible += shown;
          covered_[row * s_.seqlen_kv + col] += shown;
        }
      }
      ASSERT_EQ(visible, p.visible);
      ASSERT_GT(visible, 0) << "an empty part";
    }
  }

  std::vector<int64_t> keys_of(const tea_cp_part& p) const {
    if (p.source >= 0) return shard(p.source, s_.seqlen_kv);
    std::vector<int64_t> all(s_.seqlen_kv);
    for (int64_t i = 0; i < s_.seqlen_kv; ++i) all[i] = i;
    return all;
  }

  // The rows that a part reads are local or were moved in an earlier step.
  void check_reads(int32_t r, const tea_cp_part& p) const {
    std::set<int64_t> here;
    const auto mine = shard(r / group_, s_.seqlen_kv);
    if (group_ == 1) here.insert(mine.begin(), mine.end());
    for (const tea_cp_move& m : ranks_[r].moves) {
      if (m.to != r || m.step >= p.step) continue;
      const bool heads = group_ > 1 && m.step == 0;
      const auto rows =
          heads ? rows_of(s_, m.owner, 1, s_.seqlen_kv) : shard(m.owner, s_.seqlen_kv);
      for (int64_t i = 0; i < m.count; ++i) here.insert(rows.at(m.begin + i));
    }
    if (group_ > 1) {  // its own rows of the exchange of heads
      const auto own = rows_of(s_, r, 1, s_.seqlen_kv);
      here.insert(own.begin(), own.end());
    }
    const auto kv = keys_of(p);
    for (int64_t j = 0; j < p.kv_count; ++j) ASSERT_TRUE(here.contains(kv.at(p.kv_begin + j)));
  }

  tea_cp_shape s_;
  int32_t group_;
  std::vector<CpSchedule> ranks_;
  std::map<int64_t, int32_t> covered_;
};

constexpr int64_t kLengths[][2] = {{0, 0}, {1, 1}, {0, 7}, {48, 48}, {61, 61}, {37, 90}, {96, 33}};

void check_all(int32_t strategy, int32_t inner = 0) {
  for (const int32_t sharding : {TEA_CP_ZIGZAG, TEA_CP_CONTIGUOUS})
    for (const Mask& mask : kMasks)
      for (int32_t world = 1; world <= 16; ++world)
        for (const auto& [q, kv] : kLengths)
          for (const int32_t positions : {0, 1}) {
            if (inner && world % inner) continue;
            tea_cp_shape s = shape_of(world, strategy, sharding, mask, q, kv);
            s.positions = positions, s.inner = inner;
            SCOPED_TRACE(std::string(mask.name) + " world " + std::to_string(world) + " sharding " +
                         std::to_string(sharding) + " " + std::to_string(q) + "x" +
                         std::to_string(kv));
            World(s).check();
            if (testing::Test::HasFatalFailure()) return;
          }
}

TEST(CpSchedule, Ring) { check_all(TEA_CP_RING); }
TEST(CpSchedule, AllGather) { check_all(TEA_CP_ALL_GATHER); }
TEST(CpSchedule, Halo) { check_all(TEA_CP_HALO); }
TEST(CpSchedule, AllToAll) { check_all(TEA_CP_ALL_TO_ALL); }
TEST(CpSchedule, ExchangeOfTwoInsideARing) { check_all(TEA_CP_RING, 2); }
TEST(CpSchedule, ExchangeOfThreeInsideARing) { check_all(TEA_CP_RING, 3); }
TEST(CpSchedule, LongerSequences) {
  for (const int32_t strategy : {TEA_CP_RING, TEA_CP_HALO})
    for (const int32_t world : {3, 16})
      for (const int64_t length : {512, 517}) {
        World(shape_of(world, strategy, TEA_CP_ZIGZAG, kMasks[1], length, length)).check();
        World(shape_of(world, strategy, TEA_CP_ZIGZAG, kMasks[4], length, length)).check();
      }
}

// Every rank of a causal mask with zigzag computes the same number of pairs, to 1 %.
TEST(CpSchedule, CausalZigzagIsBalanced) {
  for (int32_t world = 2; world <= 16; ++world) {
    const int64_t length = int64_t{world} * 2 * 512;
    const World w(shape_of(world, TEA_CP_RING, TEA_CP_ZIGZAG, kMasks[1], length, length));
    int64_t most = 0, sum = 0;
    for (const CpSchedule& rank : w.ranks()) {
      int64_t mine = 0;
      for (const tea_cp_part& p : rank.parts) mine += p.visible;
      most = std::max(most, mine), sum += mine;
    }
    EXPECT_GE(static_cast<double>(sum) / world / static_cast<double>(most), 0.99) << world;
    EXPECT_EQ(sum, length * (length + 1) / 2);
  }
}

// The parts of a step of a causal ring are joined into one, as the halves of a shard are adjacent.
TEST(CpSchedule, JoinsWhatNeedsNoPositions) {
  tea_cp_shape s = shape_of(4, TEA_CP_RING, TEA_CP_ZIGZAG, kMasks[1], 256, 256);
  s.rank = 2;
  EXPECT_EQ(cp_schedule(s).parts.size(), 4u);
  s.positions = 1;
  EXPECT_GT(cp_schedule(s).parts.size(), 4u);
}

// A window of 128 Ki rows over 8 ranks: a rank receives the window, whatever the length.
TEST(CpSchedule, HaloMovesFollowTheWindow) {
  for (const int64_t length : {1 << 14, 1 << 17}) {
    tea_cp_shape s =
        shape_of(8, TEA_CP_HALO, TEA_CP_CONTIGUOUS, {"", 0, 0, 1024, 1024}, length, length);
    s.rank = 3;
    int64_t received = 0;
    for (const tea_cp_move& m : cp_schedule(s).moves) received += m.to == 3 ? m.count : 0;
    EXPECT_LE(received, 2 * 1024 * 1.1);
    EXPECT_GE(received, 2 * 1024);
  }
}

// With contiguous shards of a causal mask nothing travels to a rank before its owner.
TEST(CpSchedule, UnneededMovesDoNotExist) {
  tea_cp_shape s = shape_of(6, TEA_CP_RING, TEA_CP_CONTIGUOUS, kMasks[1], 96, 96);
  for (s.rank = 0; s.rank < s.world; ++s.rank)
    for (const tea_cp_move& m : cp_schedule(s).moves) EXPECT_LT(m.from, m.to);
}

TEST(CpSchedule, PairsInBand) {
  for (int64_t lo = -6; lo <= 6; ++lo)
    for (int64_t hi = -6; hi <= 6; ++hi)
      for (int64_t rows = 0; rows <= 4; ++rows)
        for (int64_t cols = 0; cols <= 5; ++cols) {
          int64_t n = 0;
          for (int64_t i = 0; i < rows; ++i)
            for (int64_t j = 0; j < cols; ++j) n += lo <= j - i && j - i <= hi;
          EXPECT_EQ(pairs_in_band({lo, hi}, rows, cols), n) << lo << "," << hi;
        }
  EXPECT_EQ(pairs_in_band({-kUnbounded, kUnbounded}, 3, 4), 12);
}

TEST(CpSchedule, ApiReportsCountsAndWritesWhatFits) {
  const tea_cp_shape s = shape_of(4, TEA_CP_RING, TEA_CP_ZIGZAG, kMasks[0], 64, 64);
  size_t parts = 0, moves = 0;
  ASSERT_EQ(tea_cp_schedule(&s, nullptr, &parts, nullptr, &moves), TEA_OK);
  EXPECT_EQ(parts, 4u);
  EXPECT_EQ(moves, 6u);
  std::vector<tea_cp_part> all(parts);
  ASSERT_EQ(tea_cp_schedule(&s, all.data(), &parts, nullptr, &moves), TEA_INVALID);
  moves = 0;
  ASSERT_EQ(tea_cp_schedule(&s, all.data(), &parts, nullptr, &moves), TEA_OK);
  EXPECT_EQ(all[0].visible, 16 * 16);
}

TEST(CpSchedule, RefusesWhatIsInvalid) {
  const auto error = [](auto&& change) {
    tea_cp_shape s = shape_of(4, TEA_CP_RING, TEA_CP_ZIGZAG, kMasks[0], 64, 64);
    change(s);
    size_t parts = 0, moves = 0;
    EXPECT_EQ(tea_cp_schedule(&s, nullptr, &parts, nullptr, &moves), TEA_INVALID);
    return std::string(tea_error());
  };
  EXPECT_EQ(error([](auto& s) { s.rank = 4; }),
            "rank is 4; needs 0 or more, less than world, which is 4");
  EXPECT_EQ(error([](auto& s) { s.world = 0; }), "world is 0; needs 1 to 2^20");
  EXPECT_EQ(error([](auto& s) { s.inner = 3; }),
            "inner is 3; needs 0, 1, or with a ring a divisor of world, which is 4");
  EXPECT_EQ(error([](auto& s) { s.strategy = 4; }), "strategy is 4; needs one of tea_cp_strategy");
  EXPECT_EQ(error([](auto& s) { s.sharding = 2; }), "sharding is 2; needs one of tea_cp_sharding");
  EXPECT_EQ(error([](auto& s) { s.causal = 2; }), "causal is 2; needs 0 or 1");
  EXPECT_EQ(error([](auto& s) { s.window_left = -1; }),
            "window_left is -1; needs 0 (none) or the bound + 1");
  EXPECT_EQ(error([](auto& s) { s.seqlen_kv = -1; }),
            "seqlen_kv is -1; needs 0 or more, at most 2^40");
  EXPECT_EQ(error([](auto& s) { s.struct_size = 1; }),
            "struct_size is 1; needs sizeof(tea_cp_shape)");
}

}  // namespace
}  // namespace tea
