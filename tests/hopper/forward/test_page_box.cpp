// Which rows of which pages the boxes of a block of keys load, with the addresses of TMA computed
// here: the code of the load and scheduler warps compiled for the host.
#include <gtest/gtest.h>

#include <random>

#include "gpu/fast_divisor.h"
#include "hopper/forward/page_box.cuh"

namespace tea::hopper {
namespace {

TEST(HopperPageBox, HasRowsThatDivideAPageAndABlock) {
  EXPECT_EQ(box_rows(16, 128), 16);
  EXPECT_EQ(box_rows(64, 80), 16);
  EXPECT_EQ(box_rows(64, 64), 64);
  EXPECT_EQ(box_rows(96, 128), 32);
  EXPECT_EQ(box_rows(1024, 128), 128);
  EXPECT_EQ(box_rows(24, 80), 8);
}

// The key that row `row` of a box holds, or -1 for zeros; -2: TMA would leave the map or access
// nothing of it.
int key_at(const PageBox& box, int page_size, int rows, int row) {
  const int y = row + box.y;
  if (box.y <= -rows || box.y >= rows || box.z < 0 || box.z > page_size) return -2;
  if (y < 0 || y >= rows) return -1;
  const int in_page = box.y < 0 ? y + box.z : y + box.z - rows;
  return in_page < 0 || in_page >= page_size ? -2 : box.page * page_size + in_page;
}

template <int kBlockN>
void check_boxes(uint32_t seed) {
  std::mt19937 generator(seed);
  const auto between = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(generator);
  };
  constexpr int kPages[] = {8, 16, 24, 32, 40, 64, 80, 96, 128, 256, 1024};
  const int page_size = kPages[between(0, 10)];
  AttentionArguments f = {};
  f.batch = 1, f.heads_q = f.heads_kv = 1;
  f.queries.max_seqlen = between(1, between(0, 1) ? 4 : 500);
  f.keys.max_seqlen = between(0, 900);
  f.mask = {between(0, 1), between(0, 1), between(0, 1) ? between(1, between(0, 1) ? 4 : 600) : 0,
            between(0, 1) ? between(1, between(0, 1) ? 4 : 600) : 0};
  for (int64_t& o : f.origin) o = between(0, 1) ? between(0, 300) : 0;
  const SequenceBounds plain = bounds_of(f, 0);
  const int rows = box_rows(page_size, kBlockN);
  int log2 = 0;
  while (1 << log2 < rows) ++log2;
  SequenceBounds b = plain;
  align_to_boxes(b, rows);
  // The same keys are visible, counted from another one.
  const int moved = plain.skipped_keys - b.skipped_keys;
  ASSERT_EQ(b.start_kv, b.skipped_keys);
  ASSERT_TRUE(moved >= 0 && moved < rows);
  ASSERT_EQ(b.seqlen_kv, plain.seqlen_kv + moved);
  ASSERT_EQ(b.lo, plain.lo + moved);
  ASSERT_EQ(b.hi, plain.hi + moved);
  const int first_attended = plain.start_kv, end = plain.start_kv + plain.seqlen_kv;
  const FastDivisor divisor(page_size);
  for (int block = 0; block * kBlockN < b.seqlen_kv; ++block)
    for (int number = 0; number < kBlockN / rows; ++number) {
      const PageBox box = page_box<kBlockN>(b, divisor, log2, block, number);
      int loaded = 0;
      for (int row = 0; row < rows; ++row) {
        const int want = b.start_kv + block * kBlockN + number * rows + row;
        const int got = key_at(box, page_size, rows, row);
        ASSERT_NE(got, -2) << "block " << block << " box " << number << " row " << row;
        loaded += got >= 0;
        // Rows without an attended key are zeros, or an attended key in a repeated box.
        const bool attended = want >= first_attended && want < end;
        const bool right = attended ? got == want : got < 0 || (got >= first_attended && got < end);
        ASSERT_TRUE(right) << got << " for " << want << ", block " << block << " box " << number;
      }
      ASSERT_GT(loaded, 0) << "block " << block << " box " << number;
    }
}

TEST(HopperPageBox, HoldsTheAttendedKeysOfABlockAndNoOtherKey) {
  for (uint32_t seed = 0; seed < 4000 && !HasFatalFailure(); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    check_boxes<128>(seed);
    check_boxes<80>(seed);
    check_boxes<64>(seed);
  }
}

}  // namespace
}  // namespace tea::hopper
