// Cumulative lengths from lengths and from masks.
#include "buffer.h"
#include "ops/cu_seqlens.h"

namespace tea {
namespace {

std::vector<int32_t> filled(tea_cu_seqlens a, int32_t* status = nullptr) {
  std::vector<int32_t> cu(static_cast<size_t>(a.batch) + 2, -77);
  a.struct_size = sizeof a;
  a.cu_seqlens = cu.data();
  a.status = status;
  fill_cu_seqlens(a, {});
  EXPECT_EQ(cu.back(), -77) << "written past batch + 1";
  cu.pop_back();
  return cu;
}

tea_cu_seqlens from_lengths(const std::vector<int32_t>& lengths) {
  tea_cu_seqlens a{};
  a.lengths = lengths.data();
  a.batch = static_cast<int64_t>(lengths.size());
  return a;
}

TEST(CuSeqlens, SumsLengths) {
  const std::vector<int32_t> lengths = {3, 0, 5, 1};
  EXPECT_EQ(filled(from_lengths(lengths)), (std::vector<int32_t>{0, 3, 3, 8, 9}));
  EXPECT_EQ(filled({}), std::vector<int32_t>{0});
}

TEST(CuSeqlens, ReportsWhatDoesNotFit) {
  int32_t status = 0;
  const std::vector<int32_t> negative = {3, -2, 5};
  EXPECT_EQ(filled(from_lengths(negative), &status), (std::vector<int32_t>{0, 3, 3, 8}));
  EXPECT_EQ(status, TEA_STATUS_BAD_LENGTHS);
  status = 0;
  const std::vector<int32_t> huge = {2000000000, 147483647, 1};
  EXPECT_EQ(filled(from_lengths(huge), &status),
            (std::vector<int32_t>{0, 2000000000, 2147483647, 2147483647}));
  EXPECT_EQ(status, TEA_STATUS_BAD_LENGTHS);
}

TEST(CuSeqlens, CountsMasks) {
  const std::vector<uint8_t> mask = {0, 0, 1, 1, 1, 255, 0, 0, 0, 0, 0, 0};
  tea_cu_seqlens a{};
  a.mask = mask.data();
  a.batch = 3, a.seqlen = 4;
  EXPECT_EQ(filled(a), (std::vector<int32_t>{0, 2, 4, 8}));
  a.mask_marks_tokens = 1;
  EXPECT_EQ(filled(a), (std::vector<int32_t>{0, 2, 4, 4}));
}

TEST(CuSeqlens, NamesWhatIsWrong) {
  const std::vector<int32_t> lengths = {1};
  const std::vector<uint8_t> mask = {1};
  const auto error = [&](auto change) {
    tea_cu_seqlens a = from_lengths(lengths);
    int32_t cu[2];
    a.cu_seqlens = cu;
    change(a);
    return error_of([&] { fill_cu_seqlens(a, {}); });
  };
  EXPECT_EQ(error([&](auto& a) { a.mask = mask.data(); }),
            "mask is a pointer; needs NULL where lengths are given");
  EXPECT_EQ(error([](auto& a) { a.lengths = nullptr; }),
            "lengths is NULL; needs memory, or mask instead");
  EXPECT_EQ(error([](auto& a) { a.seqlen = 3; }), "seqlen is 3; needs 0 without mask");
  EXPECT_EQ(error([](auto& a) { a.batch = -1; }), "batch is -1; needs 0 or more");
  EXPECT_EQ(error([](auto& a) { a.cu_seqlens = nullptr; }), "cu_seqlens is NULL; needs memory");
}

TEST(CuSeqlens, CountsPositiveEntries) {
  const int32_t values[] = {0, 5, -1, 7, 0, 1};
  EXPECT_EQ(count_positive(values, 6, nullptr, {}), 3);
  EXPECT_EQ(count_positive(values, 3, nullptr, {}), 1);
  EXPECT_EQ(count_positive(nullptr, 0, nullptr, {}), 0);
  EXPECT_EQ(error_of([] { count_positive(nullptr, 1, nullptr, {}); }),
            "values is NULL; needs memory");
}

}  // namespace
}  // namespace tea
