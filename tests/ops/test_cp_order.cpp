// Which tokens a rank owns, and the order of tokens over the ranks.
#include <set>

#include "buffer.h"
#include "ops/context_parallel.h"

namespace tea {
namespace {

// Lengths 24, 0, 48, 12 for worlds 1, 2, 3: multiples of 2, 4 and 6.
const std::vector<int32_t> kCu = {0, 24, 24, 72, 84};
constexpr int64_t kBatch = 4, kTokens = 84;

tea_cp_partition arguments(int32_t world, int32_t rank, std::vector<int32_t>& indices) {
  tea_cp_partition a{};
  a.struct_size = sizeof a;
  a.world = world, a.rank = rank;
  a.cu_seqlens = kCu.data(), a.indices = indices.data();
  a.batch = kBatch, a.tokens = kTokens;
  return a;
}

// The formula of the interface: local token c of a sequence whose share is `local` tokens.
int64_t owned(int64_t start, int64_t local, int64_t world, int64_t rank, int64_t c) {
  return c < local / 2 ? start + rank * local / 2 + c
                       : start + (2 * world - 2 - rank) * local / 2 + c;
}

TEST(CpOrder, IndicesFollowTheFormulaAndCoverEveryToken) {
  for (int32_t world : {1, 2, 3}) {
    std::set<int32_t> seen;
    for (int32_t rank = 0; rank < world; ++rank) {
      std::vector<int32_t> indices(kTokens / world, -1), expected;
      cp_partition_indices(arguments(world, rank, indices), {});
      for (int64_t i = 0; i < kBatch; ++i)
        for (int64_t c = 0, local = (kCu[i + 1] - kCu[i]) / world; c < local; ++c)
          expected.push_back(static_cast<int32_t>(owned(kCu[i], local, world, rank, c)));
      EXPECT_EQ(indices, expected);
      seen.insert(indices.begin(), indices.end());
    }
    EXPECT_EQ(seen.size(), static_cast<size_t>(kTokens));
  }
}

TEST(CpOrder, CausalWorkIsBalanced) {
  // Under a causal mask token t attends t + 1 keys: every rank has the same sum.
  const std::vector<int32_t> cu = {0, 96};
  std::set<int64_t> sums;
  for (int32_t rank = 0; rank < 4; ++rank) {
    std::vector<int32_t> indices(24);
    tea_cp_partition a = arguments(4, rank, indices);
    a.cu_seqlens = cu.data(), a.batch = 1, a.tokens = 96;
    cp_partition_indices(a, {});
    int64_t sum = 0;
    for (int32_t t : indices) sum += t + 1;
    sums.insert(sum);
  }
  EXPECT_EQ(sums.size(), 1u);
}

TEST(CpOrder, ThereAndBack) {
  std::mt19937_64 random(1);
  constexpr int64_t kRow = 3;
  for (int32_t world : {1, 2, 3}) {
    Buffer tokens = random_buffer(TEA_FP16, kTokens * kRow, random);
    Buffer ranked(TEA_FP16, kTokens * kRow), back(TEA_FP16, kTokens * kRow);
    tea_cp_order a{};
    a.struct_size = sizeof a;
    a.world = world, a.input = tokens.data(), a.output = ranked.data();
    a.cu_seqlens = kCu.data(), a.batch = kBatch, a.tokens = kTokens, a.row_bytes = 2 * kRow;
    cp_to_rank_order(a, {});
    for (int32_t rank = 0; rank < world; ++rank) {
      std::vector<int32_t> source(kTokens / world);
      cp_partition_indices(arguments(world, rank, source), {});
      for (int64_t t = 0; t < kTokens / world; ++t)
        for (int64_t e = 0; e < kRow; ++e)
          ASSERT_EQ(ranked[(rank * kTokens / world + t) * kRow + e], tokens[source[t] * kRow + e]);
    }
    a.input = ranked.data(), a.output = back.data();
    cp_to_sequence_order(a, {});
    EXPECT_TRUE(back == tokens);
  }
}

TEST(CpOrder, CopyValid) {
  const std::vector<int32_t> padded = {2, 6, 8, 8, 13}, cu = {0, 3, 5, 5, 6};
  constexpr int64_t kCount = 14;
  for (int64_t tokens : {kCount, int64_t{7}}) {
    std::mt19937_64 random(2);
    Buffer input = random_buffer(TEA_FP32, kCount, random), output(TEA_FP32, kCount);
    int32_t status = 0;
    tea_cp_valid a{};
    a.struct_size = sizeof a;
    a.input = input.data(), a.output = output.data();
    a.cu_seqlens_padded = padded.data(), a.cu_seqlens = cu.data();
    a.batch = 4, a.tokens = tokens, a.row_bytes = 4, a.status = &status;
    cp_copy_valid(a, {});
    std::set<int64_t> valid;
    for (int64_t i = 0; i < 4; ++i)
      for (int64_t p = padded[i]; p < padded[i + 1] && p < tokens; ++p)
        if (p - padded[i] < cu[i + 1] - cu[i]) valid.insert(p);
    for (int64_t p = 0; p < kCount; ++p)
      if (valid.count(p))
        EXPECT_EQ(output[p], input[p]);
      else
        EXPECT_TRUE(output.untouched(p)) << p;
    EXPECT_EQ(status, tokens == kCount ? 0 : TEA_STATUS_BAD_LENGTHS);
  }
}

TEST(CpOrder, InvalidValuesAreReportedAndNotFollowed) {
  const std::vector<int32_t> bad[] = {
      {0, 22, 24, 72, 84}, {0, 24, 20, 72, 84}, {-4, 24, 24, 72, 84}, {0, 24, 24, 72, 88}};
  for (const std::vector<int32_t>& cu : bad) {
    Buffer input(TEA_FP16, kTokens), output(TEA_FP16, kTokens);
    int32_t status = 0;
    tea_cp_order a{};
    a.struct_size = sizeof a;
    a.world = 2, a.input = input.data(), a.output = output.data();
    a.cu_seqlens = cu.data(), a.batch = kBatch, a.tokens = kTokens, a.row_bytes = 2;
    a.status = &status;
    cp_to_rank_order(a, {});
    EXPECT_EQ(status, TEA_STATUS_BAD_LENGTHS);
  }
}

TEST(CpOrder, NamesWhatIsWrong) {
  std::vector<int32_t> indices(kTokens);
  const auto error = [&](auto change) {
    tea_cp_partition a = arguments(2, 0, indices);
    change(a);
    return error_of([&] { cp_partition_indices(a, {}); });
  };
  EXPECT_EQ(error([](auto& a) { a.world = 0; }), "world is 0; needs 1 or more");
  EXPECT_EQ(error([](auto& a) { a.rank = 2; }), "rank is 2; needs 0 .. world - 1 = 1");
  EXPECT_EQ(error([](auto& a) { a.rank = -1; }), "rank is -1; needs 0 .. world - 1 = 1");
  EXPECT_EQ(error([](auto& a) { a.tokens = 86; }),
            "tokens is 86; needs a multiple of 2 * world = 4");
  EXPECT_EQ(error([](auto& a) { a.tokens = int64_t{1} << 32; }),
            "tokens is 4294967296; needs at most 2^31 - 1, as cu_seqlens is int32");
  EXPECT_EQ(error([](auto& a) { a.indices = nullptr; }), "indices is NULL; needs memory");
  EXPECT_EQ(error([](auto& a) { a.cu_seqlens = nullptr; }), "cu_seqlens is NULL; needs memory");
}

}  // namespace
}  // namespace tea
