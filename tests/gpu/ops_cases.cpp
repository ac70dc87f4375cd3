// Draws of every operation: odd sizes, odd strides, NaN where nothing may be read, empty things,
// and occasionally invalid values in device memory.
#include "ops_cases.h"

#include <algorithm>
#include <numeric>

namespace tea::kit {
namespace {

constexpr std::initializer_list<int32_t> kReals = {TEA_FP16, TEA_BF16, TEA_FP32, TEA_FP64};
constexpr std::initializer_list<int32_t> kFp8 = {TEA_E4M3, TEA_E5M2};
constexpr std::initializer_list<int32_t> kAll = {TEA_FP16, TEA_BF16, TEA_FP32,
                                                 TEA_FP64, TEA_E4M3, TEA_E5M2};

template <class Args>
Args sized() {
  Args a{};
  a.struct_size = sizeof a;
  return a;
}

// Starting at 0, `count` lengths of 0 .. most, multiples of `step`.
std::vector<int32_t> cumulative(Side& s, int64_t count, int64_t most, int64_t step = 1) {
  std::vector<int32_t> cu = {0};
  for (int64_t i = 0; i < count; ++i)
    cu.push_back(cu.back() + static_cast<int32_t>(s.pick(0, most) * step));
  return cu;
}

// Spoils some of the numbers, in one case of ten. Then results may depend on the order of threads.
void spoil(Side& s, std::vector<int32_t>& numbers) {
  if (!s.chance(10)) return;
  for (int32_t& n : numbers)
    if (s.chance(30)) n = s.one_of({-1, -7, 3, 1000, 2000000000, -2000000000});
  s.do_not_compare();
}

int64_t head_dim(Side& s) { return s.one_of<int64_t>({0, 1, 3, 8, 16, 64, 72, 128}); }

// ------------------------------------------------------------------------------------- KV cache

void set_new_tokens(Side& s, tea_kv_append& a, std::vector<int32_t>& cu_new) {
  a.new_form = s.one_of<int32_t>({TEA_DENSE, TEA_RAGGED});
  cu_new = cumulative(s, a.batch, 5);
  if (a.new_form == TEA_RAGGED)
    a.tokens_new = cu_new.back() + s.pick(0, 2);
  else
    a.max_new = 5 + s.pick(0, 2);
  const int64_t rows = a.new_form == TEA_RAGGED ? a.tokens_new : a.batch * a.max_new;
  const int32_t dtype = a.new_dtype ? a.new_dtype : a.dtype;
  a.new_k = s.normal(dtype, rows * a.heads * a.dim_k);
  a.new_v = s.normal(dtype, rows * a.heads * a.dim_v);
}

// Caches of FP8, to which new tokens are cast.
void set_cast(Side& s, tea_kv_append& a) {
  if (!s.chance(40)) return;
  a.dtype = s.one_of<int32_t>({TEA_E4M3, TEA_E5M2});
  a.new_dtype = s.one_of<int32_t>({TEA_FP16, TEA_BF16, TEA_FP32});
  a.kv_scale = s.one_of<int32_t>({TEA_KV_SCALE_TENSOR, TEA_KV_SCALE_HEAD});
  const int64_t scales = a.kv_scale == TEA_KV_SCALE_HEAD ? a.heads : 1;
  if (s.chance(80)) a.k_scale_inv = static_cast<const float*>(s.normal(TEA_FP32, scales));
  if (s.chance(80)) a.v_scale_inv = static_cast<const float*>(s.normal(TEA_FP32, scales));
}

void kv_cache_append(Side& s) {
  auto a = sized<tea_kv_append>();
  a.dtype = s.one_of(kAll), a.batch = s.pick(0, 6), a.heads = s.pick(1, 3);
  a.dim_k = head_dim(s), a.dim_v = s.chance(60) ? a.dim_k : head_dim(s);
  set_cast(s, a);
  std::vector<int32_t> cu_new;
  set_new_tokens(s, a, cu_new);
  const bool paged = s.chance(50), table = paged || s.chance(50);
  a.reindex = table && !paged;
  a.page_size = paged ? s.pick(1, 9) : s.pick(12, 30);
  a.pages_per_sequence = paged ? s.pick(12, 14) / a.page_size + 1 : s.pick(0, 1);
  const int64_t width = std::max<int64_t>(a.pages_per_sequence, 1);
  a.pages = a.batch * width + s.pick(0, 3);
  std::vector<int32_t> pages(static_cast<size_t>(a.pages));
  std::iota(pages.begin(), pages.end(), 0);
  if (paged || s.chance(30)) std::shuffle(pages.begin(), pages.end(), s.random);
  if (!paged && a.pages > a.batch) pages.erase(pages.begin());  // an ascending list with a gap
  pages.resize(static_cast<size_t>(a.batch * width));
  std::vector<int32_t> cu_cached = {0};
  for (int64_t n = 0; n < a.batch; ++n)
    cu_cached.push_back(cu_cached.back() + cu_new[n + 1] - cu_new[n] +
                        static_cast<int32_t>(s.pick(0, 7)));
  spoil(s, cu_new), spoil(s, cu_cached), spoil(s, pages);
  a.page_table = table ? s.numbers(pages) : nullptr;
  a.cu_new = s.numbers(cu_new), a.cu_cached = s.numbers(cu_cached);
  const int64_t slots = a.pages * a.page_size * a.heads;
  a.k_cache = s.normal(a.dtype, slots * a.dim_k);
  a.v_cache = s.normal(a.dtype, slots * a.dim_v);
  if (s.chance(30)) {  // [page_size, pages, heads, dim]
    a.k_cache_stride = {a.heads * a.dim_k, a.pages * a.heads * a.dim_k, a.dim_k};
    a.v_cache_stride = {a.heads * a.dim_v, a.pages * a.heads * a.dim_v, a.dim_v};
  }
  a.status = s.chance(80) ? s.status() : nullptr;
  s.run([&] { return tea_kv_cache_append(&a, s.device(), s.stream()); });
}

// ---- Ragged and padded batches
// -------------------------------------------------------------------

void thd_convert(Side& s) {
  auto a = sized<tea_thd_convert>();
  const bool to_bshd = s.chance(50);
  a.dtype = s.one_of(kAll), a.zero_fill = s.chance(50);
  a.batch = s.pick(0, 40), a.seqlen = s.pick(0, 20), a.heads = s.pick(0, 3), a.dim = head_dim(s);
  std::vector<int32_t> cu = cumulative(s, a.batch, a.seqlen);
  a.tokens = cu.back();
  std::vector<int32_t> offsets;
  if (s.chance(50)) {  // the sequences in another order, with gaps
    std::vector<int64_t> order(static_cast<size_t>(a.batch));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), s.random);
    offsets.resize(order.size());
    a.tokens = 0;
    for (int64_t i : order) {
      offsets[i] = static_cast<int32_t>(a.tokens += s.pick(0, 3));
      a.tokens += cu[i + 1] - cu[i];
    }
  }
  a.tokens += s.pick(0, 300);
  spoil(s, cu), spoil(s, offsets);
  a.cu_seqlens = s.numbers(cu), a.offsets = offsets.empty() ? nullptr : s.numbers(offsets);
  const int64_t row = a.heads * a.dim, thd = a.tokens * row, bshd = a.batch * a.seqlen * row;
  if (s.chance(30))
    a.bshd_stride = {row, a.batch * row, a.dim};  // sbhd
  else if (s.chance(30))
    a.bshd_stride = {a.seqlen * row, a.dim, a.seqlen * a.dim};  // bhsd
  a.input = s.normal(a.dtype, to_bshd ? thd : bshd);
  a.output = s.fresh(a.dtype, to_bshd ? bshd : thd);
  a.status = s.status();
  s.run([&] { return (to_bshd ? tea_thd_to_bshd : tea_bshd_to_thd)(&a, s.device(), s.stream()); });
}

void cu_seqlens_fill(Side& s) {
  auto a = sized<tea_cu_seqlens>();
  a.batch = s.one_of<int64_t>({0, 1, 5, 1024, 3000, 8192, 8193, 40000});
  if (s.chance(50)) {
    std::vector<int32_t> lengths;
    const int32_t most = s.one_of({10, 100000, 2000000000});
    for (int64_t i = 0; i < a.batch; ++i)
      lengths.push_back(s.chance(1) ? -5 : static_cast<int32_t>(s.pick(0, most)));
    a.lengths = s.numbers(lengths);
  } else {
    a.seqlen = s.pick(0, 2) ? s.pick(0, 300) : s.pick(0, 100000);
    a.batch = std::min<int64_t>(a.batch, 3000000 / (a.seqlen + 1));
    std::vector<uint8_t> mask;
    for (int64_t i = 0; i < a.batch * a.seqlen; ++i)
      mask.push_back(static_cast<uint8_t>(s.random() % 3 ? s.random() : 0));
    a.mask = static_cast<uint8_t*>(s.bytes(mask)), a.mask_marks_tokens = s.chance(50);
  }
  a.cu_seqlens = s.numbers(std::vector<int32_t>(static_cast<size_t>(a.batch + 1), -9));
  a.status = s.status();
  s.run([&] { return tea_cu_seqlens_fill(&a, s.device(), s.stream()); });
}

// ---- Random state
// --------------------------------------------------------------------------------

void rng(Side& s) {
  int64_t* const state = s.numbers<int64_t>({5, -1});
  const int64_t* const seed = s.numbers<int64_t>({static_cast<int64_t>(s.random())});
  const int64_t* const offset = s.numbers<int64_t>({static_cast<int64_t>(s.random())});
  const uint64_t number = s.random();
  const int64_t which = s.pick(0, 3);
  s.run([&] {
    if (which == 0) return tea_rng_fill(state, number, ~number, s.device(), s.stream());
    if (which == 1) return tea_rng_advance(state, number, s.device(), s.stream());
    return tea_rng_fill_captured(state, seed, which == 2 ? nullptr : offset, number, s.device(),
                                 s.stream());
  });
}

void dropout_keep(Side& s) {
  auto a = sized<tea_dropout_mask>();
  a.dropout = s.one_of({0.0f, 0.1f, 0.5f, 0.99f});
  a.batch = s.pick(0, 3), a.heads = s.pick(1, 3), a.rows = s.pick(1, 70);
  a.cols = s.chance(50) ? 16 * s.pick(1, 9) : s.pick(1, 150);
  a.keep = static_cast<uint8_t*>(s.fresh(TEA_E4M3, a.batch * a.heads * a.rows * a.cols));
  a.rng_state =
      s.numbers<int64_t>({static_cast<int64_t>(s.random()), static_cast<int64_t>(s.random())});
  std::vector<int64_t> origin = {s.pick(0, 9), s.pick(0, 9), s.pick(0, 99), s.pick(0, 99)};
  if (s.chance(30)) origin[2] = origin[3] = 0;
  const bool on_device = s.chance(30);
  if (on_device && s.chance(20)) origin = {-5, int64_t{1} << 62, -1, int64_t{1} << 50};
  if (on_device) a.origin_device = s.numbers(origin);
  for (int i = 0; !on_device && i < 4; ++i) a.origin[i] = origin[static_cast<size_t>(i)];
  s.run([&] { return tea_dropout_keep(&a, s.device(), s.stream()); });
}

// ---- Merging
// -------------------------------------------------------------------------------------

void merge_parts(Side& s) {
  auto a = sized<tea_merge>();
  a.part_dtype = s.one_of(kReals), a.o_dtype = s.chance(50) ? 0 : s.one_of(kReals);
  a.parts = static_cast<int32_t>(s.chance(90) ? s.pick(1, 5) : s.pick(100, 120));
  a.batch = s.pick(0, 3), a.rows = s.pick(1, 9), a.heads = s.pick(1, 5);
  a.dim = s.one_of<int64_t>({0, 1, 3, 8, 64, 72, 128, 520});
  const int32_t o_dtype = a.o_dtype ? a.o_dtype : a.part_dtype;
  const int64_t lines = a.batch * a.rows * a.heads;
  // fp32 in the exponent: a weight is off by a few units of 2^-24.
  const double extra = o_dtype == TEA_FP64 || a.part_dtype == TEA_FP64 ? 0x1p+4 : 2;
  const Close close_o = {o_dtype == TEA_FP32 ? 64.0 : extra, 3};
  const Close close_lse = {16, 3};
  const bool fp64 = a.part_dtype == TEA_FP64;
  const int32_t lse_dtype = fp64 ? +TEA_FP64 : +TEA_FP32;
  std::vector<const void*> o, lse;
  for (int32_t i = 0; i < a.parts; ++i) {
    o.push_back(s.normal(a.part_dtype, lines * a.dim, close_o));
    lse.push_back(s.normal(lse_dtype, lines, close_lse));
  }
  if (s.chance(30))
    lse[0] = s.bytes(
        [&] {  // nothing attended
          std::vector<uint8_t> raw(static_cast<size_t>(lines) * (fp64 ? 8 : 4));
          for (int64_t i = 0; i < lines; ++i) store_real(raw.data(), lse_dtype, i, -INFINITY);
          return raw;
        }(),
        lse_dtype, close_lse);
  a.part_o = o.data(), a.part_lse = lse.data();
  const bool in_place = s.chance(30) && o_dtype == a.part_dtype;
  a.o = in_place ? const_cast<void*>(o[0]) : s.fresh(o_dtype, lines * a.dim, close_o);
  if (in_place)
    a.lse = const_cast<void*>(lse[0]);
  else if (s.chance(80))
    a.lse = s.fresh(lse_dtype, lines, close_lse);
  if (!in_place && s.chance(30)) a.o_stride = {a.heads * a.rows * a.dim, a.dim, a.rows * a.dim};
  s.run([&] { return tea_merge_parts(&a, s.device(), s.stream()); });
}

// ---- Context parallelism
// -------------------------------------------------------------------------

struct Halved {
  int64_t batch, tokens;
  const int32_t* cu_seqlens;
  std::vector<int32_t> cu;
};
Halved halved(Side& s) {
  const int64_t batch = s.pick(1, 20);
  std::vector<int32_t> cu = cumulative(s, batch, 15, 2);
  const int64_t tokens = cu.back() + s.pick(0, 5);
  std::vector<int32_t> given = cu;
  spoil(s, given);
  return {batch, tokens, s.numbers(given), cu};
}

void cp_read_half(Side& s) {
  auto a = sized<tea_cp_half>();
  const Halved h = halved(s);
  a.second = s.chance(50), a.cu_seqlens = h.cu_seqlens, a.batch = h.batch, a.tokens = h.tokens;
  a.slabs = s.pick(0, 2), a.row_bytes = s.one_of<int64_t>({0, 1, 6, 16, 256, 5000});
  const int64_t slabs = std::max<int64_t>(a.slabs, 1);
  a.tensor = s.normal(TEA_E5M2, slabs * a.tokens * a.row_bytes);
  a.half = s.fresh(TEA_E5M2, slabs * (a.tokens / 2) * a.row_bytes);
  a.status = s.status();
  s.run([&] { return tea_cp_read_half(&a, s.device(), s.stream()); });
}

void cp_lse(Side& s) {
  auto a = sized<tea_cp_lse>();
  const Halved h = halved(s);
  const bool correct = s.chance(50);
  a.packed = s.chance(50), a.cu_seqlens = h.cu_seqlens, a.batch = h.batch, a.heads = s.pick(0, 4);
  a.lse_len = a.packed ? h.tokens : 30 + s.pick(0, 3);
  a.half_len = a.packed ? h.tokens / 2 + s.pick(0, 3) : 15 + s.pick(-2, 2);  // may be too short
  const int64_t lines = (a.packed ? 1 : a.batch) * a.heads;
  a.lse = static_cast<float*>(s.normal(TEA_FP32, lines * a.lse_len, {4, 1}, true));
  a.half_lse = static_cast<float*>(s.normal(TEA_FP32, lines * a.half_len, {}, true));
  a.status = s.status();
  s.run(
      [&] { return (correct ? tea_cp_lse_correct : tea_cp_lse_read)(&a, s.device(), s.stream()); });
}

void cp_out_correct(Side& s) {
  auto a = sized<tea_cp_out>();
  const Halved h = halved(s);
  a.dtype = s.one_of(kReals), a.only_second_half = s.chance(50), a.packed = s.chance(50);
  a.cu_seqlens = h.cu_seqlens, a.batch = h.batch, a.tokens = h.tokens;
  a.heads = s.pick(1, 3), a.dim = s.one_of<int64_t>({0, 1, 3, 8, 64, 136, 2000});
  const int64_t halves = a.only_second_half ? 2 : 1, lines = (a.packed ? 1 : a.batch) * a.heads;
  a.lse_len = a.packed ? a.tokens : 30, a.step_lse_len = a.lse_len / halves;
  // The product, at up to e^8 or so, is rounded before the sum; its weight has fp32's error.
  const Close close = {a.dtype == TEA_FP32 ? 16.0 : 2, 40};
  a.out = s.normal(a.dtype, a.tokens * a.heads * a.dim, close);
  a.step_out = s.normal(a.dtype, a.tokens / halves * a.heads * a.dim);
  const auto lse = [&](int64_t length) {
    std::vector<uint8_t> raw(static_cast<size_t>(lines * length) * 4);
    for (int64_t i = 0; i < lines * length; ++i)
      store_real(raw.data(), TEA_FP32, i,
                 s.chance(10) ? -INFINITY : static_cast<double>(s.pick(0, 999)) / 999);
    return static_cast<const float*>(s.bytes(raw, TEA_FP32));
  };
  a.lse = lse(a.lse_len), a.step_lse = lse(a.step_lse_len);
  a.status = s.status();
  s.run([&] { return tea_cp_out_correct(&a, s.device(), s.stream()); });
}

void cp_grad_correct(Side& s) {
  auto a = sized<tea_cp_grad>();
  const Halved h = halved(s);
  a.dtype = s.one_of(kReals), a.cu_seqlens = h.cu_seqlens, a.batch = h.batch, a.tokens = h.tokens;
  a.first = static_cast<int32_t>(s.pick(0, 2));
  a.second = (a.first + static_cast<int32_t>(s.pick(1, 2))) % 3;
  a.slabs = s.pick(0, 2), a.row_elements = s.one_of<int64_t>({0, 1, 3, 8, 64, 5000});
  const int64_t slabs = std::max<int64_t>(a.slabs, 1);
  const int64_t step_tokens = a.first && a.second ? a.tokens : a.tokens / 2;
  a.grad = s.normal(a.dtype, slabs * a.tokens * a.row_elements, {}, true);
  a.step_grad = s.normal(a.dtype, slabs * step_tokens * a.row_elements, {}, true);
  a.status = s.status();
  s.run([&] { return tea_cp_grad_correct(&a, s.device(), s.stream()); });
}

void cp_partition_indices(Side& s) {
  auto a = sized<tea_cp_partition>();
  a.world = static_cast<int32_t>(s.pick(1, 5)),
  a.rank = static_cast<int32_t>(s.pick(0, a.world - 1));
  a.batch = s.pick(1, 30);
  std::vector<int32_t> cu = cumulative(s, a.batch, 200, 2 * a.world);
  a.tokens = cu.back() + 2 * a.world * s.pick(0, 3);
  spoil(s, cu);
  a.cu_seqlens = s.numbers(cu);
  a.indices = s.numbers(std::vector<int32_t>(static_cast<size_t>(a.tokens / a.world), -1));
  a.status = s.status();
  s.run([&] { return tea_cp_partition_indices(&a, s.device(), s.stream()); });
}

void cp_order(Side& s) {
  auto a = sized<tea_cp_order>();
  a.world = static_cast<int32_t>(s.pick(1, 5)), a.batch = s.pick(1, 10);
  std::vector<int32_t> cu = cumulative(s, a.batch, 10, 2 * a.world);
  a.tokens = cu.back() + 2 * a.world * s.pick(0, 3);
  spoil(s, cu);
  a.cu_seqlens = s.numbers(cu), a.row_bytes = s.one_of<int64_t>({0, 1, 6, 16, 256, 1040});
  a.input = s.normal(TEA_E5M2, a.tokens * a.row_bytes);
  a.output = s.fresh(TEA_E5M2, a.tokens * a.row_bytes);
  a.status = s.status();
  const bool ranks = s.chance(50);
  s.run([&] {
    return (ranks ? tea_cp_to_rank_order : tea_cp_to_sequence_order)(&a, s.device(), s.stream());
  });
}

void cp_copy_valid(Side& s) {
  auto a = sized<tea_cp_valid>();
  a.batch = s.pick(0, 20);
  std::vector<int32_t> cu = cumulative(s, a.batch, 15), padded = cu;
  for (size_t i = 1; i < padded.size(); ++i)
    padded[i] = padded[i - 1] + cu[i] - cu[i - 1] + static_cast<int32_t>(s.pick(0, 4));
  a.tokens = padded.back() + s.pick(0, 4);
  spoil(s, cu), spoil(s, padded);
  a.cu_seqlens = s.numbers(cu), a.cu_seqlens_padded = s.numbers(padded);
  a.row_bytes = s.one_of<int64_t>({0, 1, 6, 16, 256, 1040});
  a.input = s.normal(TEA_E5M2, a.tokens * a.row_bytes);
  a.output = s.fresh(TEA_E5M2, a.tokens * a.row_bytes);
  a.status = s.status();
  s.run([&] { return tea_cp_copy_valid(&a, s.device(), s.stream()); });
}

// ---- Interleaved QKV, fills
// ----------------------------------------------------------------------

void flash_prepare(Side& s) {
  auto a = sized<tea_flash_prepare>();
  a.dtype = s.one_of(kAll), a.seqlen = s.pick(0, 12), a.batch = s.pick(0, 4),
  a.heads = s.pick(1, 4);
  a.dim = head_dim(s);
  const bool forward = s.chance(50);
  const int64_t one = a.seqlen * a.batch * a.heads * a.dim;
  for (int i = 0; i < (forward ? 1 : 3); ++i)
    a.input[i] = s.normal(a.dtype, forward ? 3 * one : one);
  a.output = s.fresh(a.dtype, 3 * one);
  s.run([&] {
    return (forward ? tea_flash_prepare_forward : tea_flash_prepare_backward)(&a, s.device(),
                                                                              s.stream());
  });
}

void fill(Side& s) {
  const int32_t dtype = s.one_of(kAll);
  const int64_t count = s.chance(70) ? s.pick(0, 300) : s.pick(0, 100000), skip = s.pick(0, 20);
  auto* const data = static_cast<uint8_t*>(s.fresh(dtype, count + skip));
  const double value = s.one_of({0.0, -0.1, 1e9, double(-INFINITY), double(NAN)});
  const bool bytes = s.chance(30);
  s.run([&] {
    if (bytes)
      return tea_fill_bytes(data + skip, 0x137, static_cast<uint64_t>(count), s.device(),
                            s.stream());
    return tea_fill(data + skip * dtype_bytes(dtype), dtype, count, value, s.device(), s.stream());
  });
}

// ---- Softmax
// -------------------------------------------------------------------------------------

tea_scaled_softmax softmax_arguments(Side& s) {
  auto a = sized<tea_scaled_softmax>();
  a.dtype = s.one_of(kReals), a.kind = static_cast<int32_t>(s.pick(0, 3));
  a.scale = s.one_of({1.0f, 0.37f, -2.0f});
  a.batch = s.pick(1, 3), a.heads = s.pick(1, 3), a.rows = s.pick(0, 13);
  a.cols = s.one_of<int64_t>({1, 2, 7, 8, 31, 64, 129, 512, 1000, 4097, 8192});
  if (s.chance(3))
    a.batch = a.heads = 1, a.rows = 2, a.cols = s.one_of<int64_t>({16385, 40000, 65536});
  return a;
}

void softmax_forward(Side& s) {
  tea_scaled_softmax a = softmax_arguments(s);
  const int64_t count = a.batch * a.heads * a.rows * a.cols;
  // exp's argument has fp32's error at its own size; sums of many terms have theirs.
  const Close close = {a.dtype == TEA_FP32 ? 48.0 : a.dtype == TEA_FP64 ? 4096 : 2.1, 0};
  a.input = s.normal(a.dtype, count, close, s.chance(10));
  a.output = s.chance(30) ? const_cast<void*>(a.input) : s.fresh(a.dtype, count, close);
  if (a.kind == TEA_SCORE_MASK_GIVEN) {
    a.mask_batch = s.chance(50) ? 1 : s.chance(50) ? a.batch : 0;
    const int64_t batch = a.mask_batch ? a.mask_batch : a.batch;
    std::vector<uint8_t> mask;
    const int percent = s.one_of({0, 30, 99, 100});
    for (int64_t i = 0; i < batch * a.rows * a.cols; ++i) mask.push_back(s.chance(percent) ? 1 : 2);
    a.mask = static_cast<const uint8_t*>(s.bytes(mask));
  }
  s.run([&] { return tea_scaled_softmax_forward(&a, s.device(), s.stream()); });
}

void softmax_backward(Side& s) {
  tea_scaled_softmax a = softmax_arguments(s);
  const int64_t count = a.batch * a.heads * a.rows * a.cols;
  // The sum over the row is off by fp32's error at its own size, which is that of normal numbers.
  const double magnitude = std::sqrt(static_cast<double>(a.cols)) * 8;
  const Close close = {a.dtype == TEA_FP32   ? 32.0
                       : a.dtype == TEA_FP64 ? 4096
                                             : 2.1,
                       a.dtype == TEA_FP32 || a.dtype == TEA_FP64 ? magnitude : 0x1p-9 * magnitude};
  a.input = s.normal(a.dtype, count, close), a.dout = s.normal(a.dtype, count, close);
  a.output = s.chance(30)   ? const_cast<void*>(a.dout)
             : s.chance(30) ? const_cast<void*>(a.input)
                            : s.fresh(a.dtype, count, close);
  s.run([&] { return tea_scaled_softmax_backward(&a, s.device(), s.stream()); });
}

// ---- FP8
// -----------------------------------------------------------------------------------------

int64_t cast_count(Side& s) {
  return s.chance(50) ? s.pick(0, 100) : s.chance(80) ? s.pick(0, 9000) : s.pick(0, 300000);
}

void fp8_quantize(Side& s) {
  auto a = sized<tea_fp8_cast>();
  a.input_dtype = s.one_of(kReals), a.output_dtype = s.one_of(kFp8), a.count = cast_count(s);
  a.input = s.normal(a.input_dtype, a.count, {}, s.chance(30));
  a.output = s.fresh(a.output_dtype, a.count);
  const bool current = s.chance(50);
  if (current) {
    a.power_of_two = s.chance(50), a.amax_floor = s.chance(30) ? 3.0f : 0;
    a.amax_given = s.chance(30);
    a.amax = s.scalar(a.amax_given ? 2.5f : float(NAN));
    if (s.chance(70)) a.scale = s.scalar(-1);
  } else {
    if (s.chance(70)) a.scale = s.scalar(s.one_of({1.0f, 100.0f, 0.3f}));
    if (s.chance(70)) a.amax = s.scalar(s.one_of({0.0f, 2.5f, 1e20f, float(NAN)}));
  }
  if (s.chance(70)) a.scale_inv = s.scalar(-1);
  s.run([&] {
    return (current ? tea_fp8_quantize_current : tea_fp8_quantize)(&a, s.device(), s.stream());
  });
}

void fp8_joint(Side& s) {
  auto a = sized<tea_fp8_joint_cast>();
  const bool back = s.chance(30), current = !back && s.chance(50);
  a.input_dtype = back ? s.one_of(kFp8) : s.one_of(kReals);
  a.output_dtype = back ? s.one_of(kReals) : s.one_of(kFp8);
  a.tensors = static_cast<int32_t>(s.pick(1, TEA_FP8_TENSORS));
  for (int i = 0; i < a.tensors; ++i) {
    a.count[i] = cast_count(s);
    a.input[i] = s.normal(a.input_dtype, a.count[i], {}, s.chance(30));
    a.output[i] = s.fresh(a.output_dtype, a.count[i]);
  }
  if (back) {
    if (s.chance(70)) a.scale_inv = s.scalar(s.one_of({1.0f, 0.01f}));
    s.run([&] { return tea_fp8_dequantize_joint(&a, s.device(), s.stream()); });
    return;
  }
  if (s.chance(70)) a.scale = s.scalar(current ? -1.0f : s.one_of({1.0f, 100.0f, 0.3f}));
  if (s.chance(70)) a.amax = s.scalar(s.one_of({0.0f, 2.5f, 1e20f, float(NAN)}));
  if (s.chance(70)) a.scale_inv = s.scalar(-1);
  if (current) {
    a.power_of_two = s.chance(50), a.amax_floor = s.chance(30) ? 3.0f : 0;
    a.maxima = s.scratch(TEA_FP8_MAXIMA);
  }
  for (int i = 0; i < 2; ++i) {
    if (s.chance(50)) continue;
    a.copied[i] = s.scalar(s.one_of({1.0f, 448.0f}));
    a.copy[i] = static_cast<float*>(s.fresh(TEA_FP32, 2));
  }
  s.run([&] {
    return (current ? tea_fp8_quantize_joint_current : tea_fp8_quantize_joint)(&a, s.device(),
                                                                               s.stream());
  });
}

void fp8_update_scales(Side& s) {
  auto a = sized<tea_fp8_scales>();
  a.dtype = s.one_of(kFp8), a.margin = s.one_of({0.0f, 1.0f, -2.0f});
  a.algorithm = s.chance(50) ? TEA_AMAX_MAX : TEA_AMAX_MOST_RECENT;
  a.length = s.chance(50) ? s.pick(1, 5) : s.pick(1, 2000), a.count = s.pick(1, 20);
  const int64_t amaxes = a.length * a.count;
  a.amax_history = static_cast<float*>(s.normal(TEA_FP32, amaxes, {}, s.chance(30)));
  a.scale = static_cast<float*>(s.normal(TEA_FP32, a.count, {1}));
  if (s.chance(50)) a.amax = static_cast<const float*>(s.normal(TEA_FP32, a.count, {}));
  s.run([&] { return tea_fp8_update_scales(&a, s.device(), s.stream()); });
}

// Every number that the type can hold.
std::vector<uint8_t> every(int32_t dtype) {
  std::vector<uint8_t> all;
  const int codes = dtype_bytes(dtype) == 1 ? 256 : 65536;
  for (int code = 0; code < codes; ++code) {
    all.push_back(static_cast<uint8_t>(code));
    if (codes > 256) all.push_back(static_cast<uint8_t>(code >> 8));
  }
  return all;
}

void fp8_of_every_number(Side& s) {
  auto a = sized<tea_fp8_cast>();
  const bool to_fp8 = s.chance(50);
  a.input_dtype = to_fp8 ? s.one_of<int32_t>({TEA_FP16, TEA_BF16}) : s.one_of(kFp8);
  a.output_dtype = to_fp8 ? s.one_of(kFp8) : s.one_of(kReals);
  const std::vector<uint8_t> all = every(a.input_dtype);
  a.count = static_cast<int64_t>(all.size()) / dtype_bytes(a.input_dtype);
  a.input = s.bytes(all, a.input_dtype), a.output = s.fresh(a.output_dtype, a.count);
  float* const factor = s.scalar(s.one_of({1.0f, 0.001f, 77.0f}));
  if (s.chance(70)) (to_fp8 ? a.scale : a.scale_inv) = factor;
  s.run(
      [&] { return (to_fp8 ? tea_fp8_quantize : tea_fp8_dequantize)(&a, s.device(), s.stream()); });
}

void amax(Side& s) {
  const int32_t dtype = s.one_of(kAll);
  const int64_t count = cast_count(s);
  const void* const data = s.normal(dtype, count, {}, s.chance(30));
  float* const result = s.scalar(s.one_of({0.0f, 2.5f, 1e20f}));
  s.run([&] { return tea_amax(data, dtype, count, result, s.device(), s.stream()); });
}

}  // namespace

const std::vector<OpCase> kOpCases = {
    {"kv_cache_append", kv_cache_append},
    {"thd_convert", thd_convert},
    {"cu_seqlens_fill", cu_seqlens_fill},
    {"rng", rng},
    {"dropout_keep", dropout_keep},
    {"merge_parts", merge_parts},
    {"cp_read_half", cp_read_half},
    {"cp_lse", cp_lse},
    {"cp_out_correct", cp_out_correct},
    {"cp_grad_correct", cp_grad_correct},
    {"cp_partition_indices", cp_partition_indices},
    {"cp_order", cp_order},
    {"cp_copy_valid", cp_copy_valid},
    {"flash_prepare", flash_prepare},
    {"fill", fill},
    {"softmax_forward", softmax_forward},
    {"softmax_backward", softmax_backward},
    {"fp8_quantize", fp8_quantize},
    {"fp8_joint", fp8_joint},
    {"fp8_update_scales", fp8_update_scales},
    {"fp8_of_every_number", fp8_of_every_number},
    {"amax", amax},
};

}  // namespace tea::kit
