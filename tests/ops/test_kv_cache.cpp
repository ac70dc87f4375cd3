// Appending to KV caches, against the definition of each token's place, element by element.
#include "buffer.h"
#include "ops/kv_cache.h"

namespace tea {
namespace {

enum class Order { kBshd, kSbhd, kThd };

// A cache of 7 pages of 4 rows, up to 3 pages per sequence, 3 sequences.
struct Setting {
  int32_t dtype = TEA_BF16;
  Order order = Order::kBshd;
  std::vector<int32_t> cu_new = {0, 3, 3, 8}, cu_cached = {0, 5, 6, 18};
  std::vector<int32_t> table = {6, 2, 99, 0, 99, 99, 3, 5, 1};
  int64_t pages = 7, page_size = 4, width = 3;
};
constexpr int64_t kBatch = 3, kMaxNew = 6, kHeads = 2, kDimK = 5, kDimV = 3;

struct Caches {
  Buffer new_k, new_v, k, v;
};

Caches caches(const Setting& s) {
  std::mt19937_64 random(3);
  const int64_t rows = s.order == Order::kThd ? s.cu_new.back() : kBatch * kMaxNew;
  const int64_t slots = s.pages * s.page_size;
  return {random_buffer(s.dtype, rows * kHeads * kDimK, random),
          random_buffer(s.dtype, rows * kHeads * kDimV, random),
          random_buffer(s.dtype, slots * kHeads * kDimK, random),
          random_buffer(s.dtype, slots * kHeads * kDimV, random)};
}

tea_kv_append arguments(const Setting& s, Caches& c, int32_t* status) {
  tea_kv_append a{};
  a.struct_size = sizeof a;
  a.dtype = s.dtype;
  a.new_form = s.order == Order::kThd ? TEA_RAGGED : TEA_DENSE;
  a.new_k = c.new_k.data(), a.new_v = c.new_v.data();
  a.k_cache = c.k.data(), a.v_cache = c.v.data();
  a.page_table = s.table.empty() ? nullptr : s.table.data();
  a.cu_new = s.cu_new.data(), a.cu_cached = s.cu_cached.data();
  a.batch = kBatch, a.heads = kHeads, a.dim_k = kDimK, a.dim_v = kDimV;
  (s.order == Order::kThd ? a.tokens_new : a.max_new) =
      s.order == Order::kThd ? s.cu_new.back() : kMaxNew;
  a.pages = s.pages, a.page_size = s.page_size, a.pages_per_sequence = s.width;
  if (s.order == Order::kSbhd) {
    a.new_k_stride = {kHeads * kDimK, kBatch * kHeads * kDimK, kDimK};
    a.new_v_stride = {kHeads * kDimV, kBatch * kHeads * kDimV, kDimV};
  }
  a.status = status;
  return a;
}

// Copies row by row what the definition says; `row` elements are heads * dim.
void expect_appended(const Setting& s, Buffer& cache, const Buffer& fresh, int64_t row) {
  for (int64_t n = 0; n < kBatch; ++n) {
    const int64_t added = s.cu_new[n + 1] - s.cu_new[n];
    const int64_t cached = s.cu_cached[n + 1] - s.cu_cached[n];
    for (int64_t i = 0; i < added; ++i) {
      const int64_t source = s.order == Order::kBshd   ? n * kMaxNew + i
                             : s.order == Order::kSbhd ? i * kBatch + n
                                                       : s.cu_new[n] + i;
      const int64_t p = cached - added + i;
      const int64_t page = s.table.empty() ? n : s.table[n * s.width + p / s.page_size];
      for (int64_t e = 0; e < row; ++e)
        cache.set((page * s.page_size + p % s.page_size) * row + e, fresh[source * row + e]);
    }
  }
}

TEST(KvCache, AppendsInEveryOrderAndDtype) {
  for (int32_t dtype : kEveryDtype)
    for (Order order : {Order::kBshd, Order::kSbhd, Order::kThd}) {
      Setting s;
      s.dtype = dtype, s.order = order;
      Caches actual = caches(s), expected = caches(s);
      int32_t status = 0;
      append_kv(arguments(s, actual, &status), {});
      expect_appended(s, expected.k, expected.new_k, kHeads * kDimK);
      expect_appended(s, expected.v, expected.new_v, kHeads * kDimV);
      EXPECT_TRUE(actual.k == expected.k && actual.v == expected.v) << dtype_name(dtype);
      EXPECT_EQ(status, 0);
    }
}

// Caches of FP8: every element is divided by the scale of its head and cast.
TEST(KvCache, CastsWhileItAppends) {
  const float k_scales[] = {0.5f, 3.0f}, v_scales[] = {0.01f, 7.0f};
  for (int32_t dtype : {TEA_E4M3, TEA_E5M2})
    for (int32_t from : {TEA_FP16, TEA_BF16, TEA_FP32})
      for (int per_head : {0, 1}) {
        Setting s, wide;
        s.dtype = dtype, s.order = wide.order = Order::kThd, wide.dtype = from;
        Caches fresh = caches(wide), rest = caches(s), expected = caches(s);
        Caches actual{std::move(fresh.new_k), std::move(fresh.new_v), std::move(rest.k),
                      std::move(rest.v)};
        tea_kv_append a = arguments(s, actual, nullptr);
        a.new_dtype = from, a.kv_scale = per_head;
        a.k_scale_inv = k_scales, a.v_scale_inv = v_scales;
        append_kv(a, {});
        const auto scaled = [&](Buffer& to, const Buffer& values, const float* scales,
                                int64_t dim) {
          for (int64_t i = 0; i < values.count(); ++i)
            to.set(i, static_cast<float>(values[i]) / scales[per_head ? i / dim % kHeads : 0]);
        };
        scaled(expected.new_k, actual.new_k, k_scales, kDimK);
        scaled(expected.new_v, actual.new_v, v_scales, kDimV);
        expect_appended(s, expected.k, expected.new_k, kHeads * kDimK);
        expect_appended(s, expected.v, expected.new_v, kHeads * kDimV);
        EXPECT_TRUE(actual.k == expected.k && actual.v == expected.v) << dtype_name(dtype);
      }
}

TEST(KvCache, RefusesCastsThatItDoesNotMake) {
  Setting s;
  Caches c = caches(s);
  const auto refuses = [&](auto&& change, const char* what) {
    tea_kv_append a = arguments(s, c, nullptr);
    change(a);
    EXPECT_EQ(error_of([&] { append_kv(a, {}); }).find(what), 0u) << what;
  };
  const float one = 1;
  refuses([](auto& a) { a.new_dtype = TEA_FP16; }, "new_dtype is fp16; needs dtype, bf16");
  refuses([](auto& a) { a.dtype = TEA_E4M3, a.new_dtype = TEA_FP64; }, "new_dtype is fp64");
  refuses([&](auto& a) { a.k_scale_inv = &one; }, "k_scale_inv, v_scale_inv or kv_scale is given");
  refuses([](auto& a) { a.kv_scale = 2; }, "kv_scale is 2");
}

TEST(KvCache, WithoutATableEachSequenceHasItsPage) {
  Setting s;
  s.table.clear(), s.width = 0, s.pages = 3, s.page_size = 12;
  Caches actual = caches(s), expected = caches(s);
  append_kv(arguments(s, actual, nullptr), {});
  expect_appended(s, expected.k, expected.new_k, kHeads * kDimK);
  EXPECT_TRUE(actual.k == expected.k);
}

TEST(KvCache, ReadsStridedCaches) {
  // Pages as [page_size, pages, heads, dim].
  Setting s;
  Caches actual = caches(s), expected = caches(s);
  tea_kv_append a = arguments(s, actual, nullptr);
  a.k_cache_stride = {kHeads * kDimK, s.pages * kHeads * kDimK, kDimK};
  append_kv(a, {});
  // The last token of sequence 2: position 11, page 1, slot 3.
  for (int64_t e = 0; e < kHeads * kDimK; ++e)
    EXPECT_EQ(actual.k[(3 * s.pages + 1) * kHeads * kDimK + e],
              expected.new_k[(2 * kMaxNew + 4) * kHeads * kDimK + e]);
}

TEST(KvCache, SequencesThatTheNewTensorsLackMustBeEmpty) {
  Setting s;
  s.cu_new = {0, 3, 3, 3}, s.cu_cached = {0, 5, 6, 13};
  Caches actual = caches(s), expected = caches(s);
  int32_t status = 0;
  tea_kv_append a = arguments(s, actual, &status);
  a.batch_new = 1;
  append_kv(a, {});
  expect_appended(s, expected.k, expected.new_k, kHeads * kDimK);
  EXPECT_TRUE(actual.k == expected.k);
  EXPECT_EQ(status, 0);
  const std::vector<int32_t> late = {0, 3, 3, 4};
  a.cu_new = late.data();
  append_kv(a, {});
  EXPECT_EQ(status, TEA_STATUS_BAD_LENGTHS);
}

// The first rows of cache row `from` at cache row `to`.
void expect_moved(const Buffer& after, const Buffer& before, int64_t from, int64_t to,
                  int64_t tokens) {
  const int64_t row = kHeads * kDimK, pitch = 12 * row;
  for (int64_t e = 0; e < tokens * row; ++e)
    ASSERT_EQ(after[to * pitch + e], before[from * pitch + e]) << from << " to " << to;
}

TEST(KvCache, ReindexMovesRowsUpToTheLastDescent) {
  Setting s;
  s.width = 1, s.pages = 4, s.page_size = 12;
  s.table = {0, 3, 1};  // the third entry is a finished sequence's
  Caches after = caches(s), before = caches(s);
  tea_kv_append a = arguments(s, after, nullptr);
  a.reindex = 1;
  append_kv(a, {});
  expect_moved(after.k, before.k, 0, 0, 2);  // 5 cached, 3 of them new
  expect_moved(after.k, before.k, 3, 1, 1);
  expect_moved(after.k, before.k, 2, 2, 7);
  // New tokens go to row n, not to row table[n].
  const int64_t row = kHeads * kDimK;
  for (int64_t e = 0; e < row; ++e)
    EXPECT_EQ(after.k[(2 * 12 + 7) * row + e], before.new_k[2 * kMaxNew * row + e]);
}

TEST(KvCache, ReindexFromAnotherFirstRow) {
  Setting s;
  s.width = 1, s.pages = 4, s.page_size = 12, s.table = {1, 2, 3};
  Caches after = caches(s), before = caches(s);
  tea_kv_append a = arguments(s, after, nullptr);
  a.reindex = 1;
  append_kv(a, {});
  expect_moved(after.k, before.k, 1, 0, 2);
  expect_moved(after.k, before.k, 2, 1, 1);
  expect_moved(after.k, before.k, 3, 2, 7);
}

TEST(KvCache, InvalidValuesAreReportedAndNotFollowed) {
  struct Bad {
    std::vector<int32_t> cu_new, cu_cached, table;
    int32_t status;
  };
  const Setting good;
  const Bad cases[] = {
      {good.cu_new, good.cu_cached, {-1, 7, 0, 0, 0, 0, 1 << 30, -5, 9}, TEA_STATUS_BAD_PAGE},
      {{0, 3, 3, 8}, {0, 2, 3, 5}, good.table, TEA_STATUS_BAD_LENGTHS},  // fewer cached than new
      {{0, 3, 3, 8}, {0, 900, 901, 1800}, good.table, TEA_STATUS_BAD_LENGTHS},
      {{0, -3, 100, 7}, good.cu_cached, good.table, TEA_STATUS_BAD_LENGTHS},
  };
  for (const Bad& bad : cases)
    for (Order order : {Order::kBshd, Order::kThd}) {
      Setting s;
      s.order = order;
      Caches c = caches(s);  // before the lengths turn bad
      s.cu_new = bad.cu_new, s.cu_cached = bad.cu_cached, s.table = bad.table;
      int32_t status = 0;
      tea_kv_append a = arguments(s, c, &status);
      if (order == Order::kThd) a.tokens_new = good.cu_new.back();
      append_kv(a, {});  // the redzones say whether memory outside was touched
      EXPECT_TRUE(status & bad.status) << status;
    }
}

TEST(KvCache, NamesWhatIsWrong) {
  Setting s;
  Caches c = caches(s);
  const auto error = [&](auto change) {
    tea_kv_append a = arguments(s, c, nullptr);
    change(a);
    return error_of([&] { append_kv(a, {}); });
  };
  EXPECT_EQ(error([](auto& a) { a.dtype = 9; }),
            "dtype is 9; needs one of fp16, bf16, fp32, fp64, e4m3, e5m2");
  EXPECT_EQ(error([](auto& a) { a.new_form = TEA_PAGED; }),
            "new_form is 3; needs TEA_DENSE or TEA_RAGGED");
  EXPECT_EQ(error([](auto& a) { a.tokens_new = 4; }),
            "tokens_new is 4; needs 0 with new_form TEA_DENSE");
  EXPECT_EQ(error([](auto& a) { a.batch_new = 4; }), "batch_new is 4; needs 0 .. batch = 3");
  EXPECT_EQ(error([](auto& a) { a.heads = -1; }), "heads is -1; needs 0 or more");
  EXPECT_EQ(error([](auto& a) { a.page_size = 0; }), "page_size is 0; needs 1 or more");
  EXPECT_EQ(error([](auto& a) { a.cu_cached = nullptr; }), "cu_cached is NULL; needs memory");
  EXPECT_EQ(error([](auto& a) { a.reindex = 1; }),
            "pages_per_sequence is 3; needs 1 with reindex or without page_table");
  EXPECT_EQ(error([](auto& a) { a.page_table = nullptr, a.pages_per_sequence = 1, a.pages = 2; }),
            "pages is 2; needs batch = 3 or more with reindex or without page_table");
  EXPECT_EQ(error([](auto& a) { a.k_cache_stride.seq = -1; }),
            "k_cache_stride is -1; needs 0 or more elements");
  EXPECT_EQ(error([](auto& a) { a.dim_v = int64_t{1} << 60; }),
            "dim_v is 1152921504606846976; needs a tensor of at most 2^56 elements");
}

TEST(KvCache, EmptyWorkNeedsNoMemory) {
  tea_kv_append a{};
  a.struct_size = sizeof a;
  a.dtype = TEA_FP16;
  EXPECT_EQ(error_of([&] { append_kv(a, {}); }), "");
}

}  // namespace
}  // namespace tea
