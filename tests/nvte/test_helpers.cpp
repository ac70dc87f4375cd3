// KV cache and format conversion of the TransformerEngine C API: the index formulas, the quirks of
// its sizes, and what is refused.
#include "expect_error.h"
#include "ops/buffer.h"
#include "tensor_of.h"
#include "transformer_engine/fused_attn.h"

namespace tea {
namespace {

using nvte::test::handle_of;
using nvte::test::ints;
using transformer_engine::TensorWrapper;

constexpr size_t kHeads = 2, kDimK = 4, kDimV = 3;
constexpr int64_t kRowK = kHeads * kDimK, kRowV = kHeads * kDimV;

// New tokens in one format and caches of `pages` pages.
struct Cache {
  NVTE_QKV_Format format;
  size_t sequences, rows;  // of the new tokens: BSHD [sequences, rows], SBHD [rows, sequences]
  size_t pages, page_size;
  Buffer new_k, new_v, k, v;

  Cache(NVTE_QKV_Format f, size_t n, size_t r, size_t p, size_t size, int32_t dtype = TEA_BF16)
      : format(f),
        sequences(n),
        rows(r),
        pages(p),
        page_size(size),
        new_k(filled(dtype, n * r * kRowK, 1)),
        new_v(filled(dtype, n * r * kRowV, 2)),
        k(filled(dtype, p * size * kRowK, 3)),
        v(filled(dtype, p * size * kRowV, 4)) {}

  static Buffer filled(int32_t dtype, size_t count, uint64_t seed) {
    std::mt19937_64 random(seed);
    return random_buffer(dtype, static_cast<int64_t>(count), random);
  }
  std::vector<size_t> shape(size_t dim) const {
    if (format == NVTE_THD) return {sequences * rows, kHeads, dim};
    if (format == NVTE_SBHD) return {rows, sequences, kHeads, dim};
    return {sequences, rows, kHeads, dim};
  }
};

struct Lengths {
  std::vector<int32_t> cu_new, cu_cached, table;
  int batch, max_ctx_len, max_seq_len, max_pages;
  int non_paged = 0;
};

void copy(Cache& c, Lengths l) {
  const std::vector<size_t> k_shape = {c.pages, c.page_size, kHeads, kDimK};
  const std::vector<size_t> v_shape = {c.pages, c.page_size, kHeads, kDimV};
  const TensorWrapper new_k = handle_of(c.new_k, c.shape(kDimK));
  const TensorWrapper new_v = handle_of(c.new_v, c.shape(kDimV));
  const TensorWrapper k = handle_of(c.k, k_shape), v = handle_of(c.v, v_shape);
  const TensorWrapper table = ints(l.table), cu_new = ints(l.cu_new), cached = ints(l.cu_cached);
  nvte_copy_to_kv_cache(new_k.data(), new_v.data(), k.data(), v.data(), table.data(), cu_new.data(),
                        cached.data(), c.format, l.batch, l.max_ctx_len, l.max_seq_len, l.max_pages,
                        l.non_paged, nullptr);
}

// Row by row what the specification says, for one of K and V.
void expect_rows(Buffer& cache, const Buffer& fresh, const Cache& c, const Lengths& l,
                 int64_t row) {
  const int64_t size = l.max_seq_len / l.max_pages;
  for (int n = 0; n < l.batch; ++n) {
    const int64_t added = l.cu_new[n + 1] - l.cu_new[n];
    const int64_t cached = l.cu_cached[n + 1] - l.cu_cached[n];
    for (int64_t i = 0; i < added; ++i) {
      const int64_t source = c.format == NVTE_BSHD   ? n * l.max_ctx_len + i
                             : c.format == NVTE_SBHD ? i * l.batch + n
                                                     : l.cu_new[n] + i;
      const int64_t p = cached - added + i;
      const int64_t page = l.non_paged ? n : l.table[n * l.max_pages + p / size];
      for (int64_t e = 0; e < row; ++e)
        cache.set((page * size + p % size) * row + e, fresh[source * row + e]);
    }
  }
}

const Lengths kPaged = {{0, 2, 3, 3}, {0, 5, 12, 13}, {4, 1, 2, 0, 3, 99}, 3, 2, 8, 2};

TEST(CopyToKvCache, PagedInEveryFormatAndType) {
  for (int32_t dtype : {TEA_FP32, TEA_FP16, TEA_BF16, TEA_E4M3, TEA_E5M2})
    for (NVTE_QKV_Format format : {NVTE_BSHD, NVTE_SBHD, NVTE_THD}) {
      Cache actual(format, 3, 2, 5, 4, dtype), expected(format, 3, 2, 5, 4, dtype);
      copy(actual, kPaged);
      expect_rows(expected.k, expected.new_k, expected, kPaged, kRowK);
      expect_rows(expected.v, expected.new_v, expected, kPaged, kRowV);
      EXPECT_TRUE(actual.k == expected.k && actual.v == expected.v) << dtype_name(dtype);
    }
}

TEST(CopyToKvCache, MaxCtxLenIsNoBoundAndTrailingSequencesAreEmpty) {
  // As PyTorch calls: THD with max_ctx_len 1, b the largest batch, of which two sequences are live.
  const Lengths l = {{0, 4, 6, 6, 6}, {0, 4, 9, 9, 9}, {0, 1, 2, 3}, 4, 1, 6, 1};
  Cache actual(NVTE_THD, 1, 6, 4, 6), expected(NVTE_THD, 1, 6, 4, 6);
  copy(actual, l);
  expect_rows(expected.k, expected.new_k, expected, l, kRowK);
  EXPECT_TRUE(actual.k == expected.k);
  // BSHD with new tokens of the live sequences only.
  const Lengths dense = {{0, 2, 3, 3, 3}, {0, 4, 9, 9, 9}, {0, 1, 2, 3}, 4, 2, 6, 1};
  Cache a(NVTE_BSHD, 2, 2, 4, 6), e(NVTE_BSHD, 2, 2, 4, 6);
  copy(a, dense);
  expect_rows(e.k, e.new_k, e, dense, kRowK);
  EXPECT_TRUE(a.k == e.k);
}

TEST(CopyToKvCache, NonPagedReindexesInPlace) {
  // The rows 0, 3, 1, 2: two entries before the descent, so row 3 becomes row 1.
  Lengths l = {{0, 1, 2, 2, 2}, {0, 4, 7, 7, 7}, {0, 3, 1, 2}, 4, 1, 6, 1};
  l.non_paged = 1;
  Cache actual(NVTE_THD, 1, 2, 4, 6), before(NVTE_THD, 1, 2, 4, 6), expected(NVTE_THD, 1, 2, 4, 6);
  copy(actual, l);
  for (int64_t e = 0; e < 2 * kRowK; ++e) expected.k.set(6 * kRowK + e, before.k[18 * kRowK + e]);
  expect_rows(expected.k, expected.new_k, expected, l, kRowK);
  EXPECT_TRUE(actual.k == expected.k);
}

TEST(CopyToKvCache, WithoutDataNothingHappens) {
  const TensorWrapper empty;
  Cache c(NVTE_THD, 1, 2, 4, 6), before(NVTE_THD, 1, 2, 4, 6);
  const TensorWrapper k = handle_of(c.k, {4, 6, kHeads, kDimK});
  nvte_copy_to_kv_cache(k.data(), empty.data(), k.data(), k.data(), empty.data(), empty.data(),
                        empty.data(), NVTE_THD, 4, 1, 6, 1, 0, nullptr);
  EXPECT_TRUE(c.k == before.k);
}

TEST(CopyToKvCache, Refuses) {
  Cache c(NVTE_BSHD, 3, 2, 5, 4);
  Lengths l = kPaged;
  c.format = NVTE_BSHD_2SBHD;
  EXPECT_NVTE_ERROR(copy(c, l), "qkv_format is 3; needs NVTE_SBHD, NVTE_BSHD or NVTE_THD");
  c.format = NVTE_BSHD;
  l.max_pages = 0;
  EXPECT_NVTE_ERROR(copy(c, l), "max_pages_per_seq is 0; needs 1 or more");
  l = kPaged, l.batch = -1;
  EXPECT_NVTE_ERROR(copy(c, l), "b is -1; needs 0 or more");
  l = kPaged, l.table[0] = 5;
  EXPECT_NVTE_ERROR(copy(c, l),
                    "cu_new_lens, cu_cached_lens or page_table is out of range in part");
  l = kPaged, l.cu_new = {0, 3, 3, 3}, l.cu_cached = {0, 5, 6, 7};  // 3 in rows of 2
  EXPECT_NVTE_ERROR(copy(c, l), "cu_new_lens, cu_cached_lens or page_table is out of range");
  l = kPaged, l.cu_cached = {0, 9, 10, 11};  // past max_seq_len
  EXPECT_NVTE_ERROR(copy(c, l), "cu_new_lens, cu_cached_lens or page_table is out of range");
  l = kPaged, l.table.pop_back();
  EXPECT_NVTE_ERROR(copy(c, l), "page_table.numel is 5; needs 6 or more");
  Cache other(NVTE_BSHD, 3, 2, 5, 4, TEA_FP16);
  const TensorWrapper bf16 = handle_of(c.k, {5, 4, kHeads, kDimK});
  const TensorWrapper fp16 = handle_of(other.k, {5, 4, kHeads, kDimK});
  EXPECT_NVTE_ERROR(
      nvte_copy_to_kv_cache(bf16.data(), bf16.data(), bf16.data(), fp16.data(), bf16.data(),
                            bf16.data(), bf16.data(), NVTE_BSHD, 3, 2, 8, 2, 0, nullptr),
      "new_k and v_cache must be of the same data type.");
  EXPECT_NVTE_ERROR(nvte_copy_to_kv_cache(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                          nullptr, NVTE_BSHD, 0, 0, 0, 1, 0, nullptr),
                    "Invalid tensor.");
}

TEST(Convert, ThereAndBackWithPaddingLeftAlone) {
  constexpr int64_t kSeqlen = 4;
  std::vector<int32_t> cu = {0, 3, 3, 7};
  const TensorWrapper lengths = ints(cu);
  for (int32_t dtype : {TEA_FP32, TEA_FP16, TEA_BF16, TEA_E4M3, TEA_E5M2}) {
    Buffer thd = Cache::filled(dtype, 7 * kRowK, 5);
    Buffer bshd(dtype, 3 * kSeqlen * kRowK), back(dtype, 7 * kRowK);
    const TensorWrapper t = handle_of(thd, {7, kHeads, kDimK});
    const TensorWrapper b = handle_of(bshd, {3, kSeqlen, kHeads, kDimK});
    const TensorWrapper u = handle_of(back, {7, kHeads, kDimK});
    nvte_convert_thd_to_bshd(t.data(), lengths.data(), b.data(), 3, kSeqlen, nullptr);
    for (int64_t i = 0; i < 3; ++i)
      for (int64_t q = 0; q < kSeqlen; ++q)
        for (int64_t e = 0; e < kRowK; ++e) {
          const int64_t at = (i * kSeqlen + q) * kRowK + e;
          if (q < cu[i + 1] - cu[i]) {
            ASSERT_EQ(bshd[at], thd[(cu[i] + q) * kRowK + e]);
          } else {
            ASSERT_TRUE(bshd.untouched(at));
          }
        }
    nvte_convert_bshd_to_thd(b.data(), lengths.data(), u.data(), 12345, nullptr);
    EXPECT_TRUE(back == thd);
  }
}

TEST(Convert, Refuses) {
  std::vector<int32_t> cu = {0, 3, 3, 7}, decreasing = {0, 3, 2, 7};
  const TensorWrapper lengths = ints(cu), bad = ints(decreasing);
  Buffer thd(TEA_FP16, 7 * kRowK), bshd(TEA_FP16, 12 * kRowK), wide(TEA_FP64, 12 * kRowK);
  const TensorWrapper t = handle_of(thd, {7, kHeads, kDimK});
  const TensorWrapper b = handle_of(bshd, {3, 4, kHeads, kDimK});
  const TensorWrapper whole(wide.data(), std::vector<size_t>{12, kRowK},
                            transformer_engine::DType::kInt64);
  const auto to_bshd = [&](const TensorWrapper& from, const TensorWrapper& cu_seqlens,
                           const TensorWrapper& to, int seqlen) {
    nvte_convert_thd_to_bshd(from.data(), cu_seqlens.data(), to.data(), 3, seqlen, nullptr);
  };
  EXPECT_NVTE_ERROR(to_bshd(b, lengths, b, 4), "tensor.ndim is 4; needs 3");
  EXPECT_NVTE_ERROR(to_bshd(t, t, b, 4), "cu_seqlens.dtype is 5; needs kNVTEInt32");
  EXPECT_NVTE_ERROR(to_bshd(t, lengths, b, 5), "new_tensor.numel is 96; needs 120 or more");
  EXPECT_NVTE_ERROR(to_bshd(t, lengths, whole, 4), "new_tensor.dtype is 3; needs");
  EXPECT_NVTE_ERROR(to_bshd(t, lengths, b, 3), "cu_seqlens is out of range in part");
  EXPECT_NVTE_ERROR(to_bshd(t, bad, b, 4), "cu_seqlens is out of range in part");
  EXPECT_NVTE_ERROR(nvte_convert_bshd_to_thd(t.data(), lengths.data(), t.data(), 7, nullptr),
                    "tensor.ndim is 3; needs 4");
}

TEST(PrepareFlashAttn, ForwardThenBackward) {
  constexpr size_t kSeqlen = 3, kBatch = 2, kDim = 128;
  constexpr int64_t kCount = kSeqlen * kBatch * kHeads * kDim;
  for (int32_t dtype : {TEA_FP16, TEA_BF16}) {
    Buffer buffer = Cache::filled(dtype, 3 * kCount, 6);
    Buffer qkv(dtype, 3 * kCount), back(dtype, 3 * kCount);
    const TensorWrapper view = handle_of(buffer, {kSeqlen, kBatch, kHeads, kDim});
    const TensorWrapper out = handle_of(qkv, {3, kBatch, kSeqlen, kHeads, kDim});
    nvte_prepare_flash_attn_fwd(view.data(), out.data(), nullptr);
    const auto at = [](size_t s, size_t b, size_t n, size_t c) {
      return static_cast<int64_t>(((s * kBatch + b) * kHeads + n) * 3 * kDim + c);
    };
    EXPECT_EQ(qkv[kCount + (1 * kSeqlen + 2) * 2 * 128 + 128 + 7], buffer[at(2, 1, 1, 128 + 7)]);
    EXPECT_EQ(qkv[2 * kCount + 5], buffer[at(0, 0, 0, 256 + 5)]);

    std::vector<Buffer> parts;
    for (int64_t w = 0; w < 3; ++w) {
      const std::vector<double> all = qkv.values();
      parts.emplace_back(
          dtype, std::vector<double>(all.begin() + w * kCount, all.begin() + (w + 1) * kCount));
    }
    const std::vector<size_t> shape = {kBatch, kSeqlen, kHeads, kDim};
    const TensorWrapper q = handle_of(parts[0], shape), k = handle_of(parts[1], shape);
    const TensorWrapper v = handle_of(parts[2], shape);
    const TensorWrapper u = handle_of(back, {kSeqlen, kBatch, kHeads, 3 * kDim});
    nvte_prepare_flash_attn_bwd(q.data(), k.data(), v.data(), u.data(), nullptr);
    EXPECT_TRUE(back == buffer);
  }
}

TEST(PrepareFlashAttn, Refuses) {
  Buffer fp32(TEA_FP32, 24), fp16(TEA_FP16, 24);
  const TensorWrapper wide = handle_of(fp32, {1, 1, 1, 8}), flat = handle_of(fp16, {24});
  const TensorWrapper half = handle_of(fp16, {1, 1, 1, 8});
  EXPECT_NVTE_ERROR(nvte_prepare_flash_attn_fwd(wide.data(), wide.data(), nullptr),
                    "qkvi.dtype is fp32; needs one of fp16, bf16");
  EXPECT_NVTE_ERROR(nvte_prepare_flash_attn_fwd(flat.data(), flat.data(), nullptr),
                    "qkvi.ndim is 1; needs 4");
  EXPECT_NVTE_ERROR(
      nvte_prepare_flash_attn_bwd(half.data(), half.data(), wide.data(), flat.data(), nullptr),
      "v.dtype is 4; needs that of q, 5");
  EXPECT_NVTE_ERROR(
      nvte_prepare_flash_attn_bwd(half.data(), half.data(), half.data(), half.data(), nullptr),
      "qkv.numel is 8; needs 24 or more");
}

}  // namespace
}  // namespace tea
