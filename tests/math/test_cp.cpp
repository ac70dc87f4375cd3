// Chunks and pieces of context parallelism: every row has one owner, for many ranks and lengths.
#include <gtest/gtest.h>

#include <vector>

#include "math/cp.h"

namespace tea {
namespace {

TEST(Cp, ChunksAreExactOrMultiplesOfSixteen) {
  EXPECT_EQ(cp_chunk_rows(64, 8), 8);
  EXPECT_EQ(cp_chunk_rows(0, 8), 0);
  EXPECT_EQ(cp_chunk_rows(65, 8), 16);
  EXPECT_EQ(cp_chunk_rows(129, 8), 32);
  EXPECT_EQ(cp_chunk_rows(1, 2048), 16);
}

TEST(Cp, EveryRowHasOneOwner) {
  for (const int32_t world : {1, 2, 3, 7, 64, 1024})
    for (const int32_t group : {1, 2, 4})
      for (const bool zigzag : {false, true})
        for (const int64_t length : {0, 1, 100, 4096, 33000}) {
          if (world % group) continue;
          const CpSharding s{world / group, group, zigzag};
          std::vector<int> owners(static_cast<size_t>(length));
          for (int32_t m = 0; m < s.members; ++m)
            for (int32_t p = 0; p < s.pieces(); ++p) {
              const CpRows rows = cp_piece(s, m, p, length);
              ASSERT_LE(rows.begin, rows.end);
              for (int64_t i = rows.begin; i < rows.end; ++i) ++owners[static_cast<size_t>(i)];
            }
          for (const int n : owners) ASSERT_EQ(n, 1);
        }
}

// With TransformerEngine's lengths rank r holds chunks r and 2 * world - 1 - r.
TEST(Cp, ZigzagIsTheDualChunkOrder) {
  const CpSharding s{4, 1, true};
  const int64_t first[] = {0, 10, 20, 30}, second[] = {70, 60, 50, 40};
  for (int32_t r = 0; r < 4; ++r) {
    EXPECT_EQ(cp_piece(s, r, 0, 80).begin, first[r]);
    EXPECT_EQ(cp_piece(s, r, 1, 80).begin, second[r]);
    EXPECT_EQ(cp_piece(s, r, 1, 80).count(), 10);
  }
}

}  // namespace
}  // namespace tea
